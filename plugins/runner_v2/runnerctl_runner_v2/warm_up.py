"""Plans that make a runner do once what real steps will do."""

from __future__ import annotations

from collections.abc import Iterator

from runnerctl.config.engine_config import SchedulerSection
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.runner.step import CachedRequest, NewRequest, StepPlan


def warm_up_plans(
    limits: SchedulerSection, max_model_len: int, block_size: int, scratch_block: int
) -> Iterator[StepPlan]:
    """A prefill, then decodes of one request and of several; all on the scratch block.

    The requests are real ones to the runner, so nothing about them is prepared another
    way. They are dropped by the last plan.
    """
    # a token after the prompt, one after each of two decodes
    prompt = min(8, block_size, max_model_len - 3, limits.max_num_batched_tokens)
    if prompt < 1:
        return  # too small a context to decode anything
    several = min(3, limits.max_num_seqs, limits.max_num_batched_tokens // prompt)
    names = [f"warm-up {i}" for i in range(max(1, several))]
    blocks = tuple([scratch_block] * -(-(prompt + 2) // block_size))
    params = SamplingParams(temperature=0, seed=0)
    yield StepPlan(
        0,
        new_requests=tuple(
            NewRequest(name, (0,) * prompt, params, prompt, frozenset(), blocks, 0)
            for name in names
        ),
        num_scheduled_tokens=dict.fromkeys(names, prompt),
    )
    for chosen in (names, names[:1]):
        computed = prompt if chosen is names else prompt + 1
        yield StepPlan(
            0,
            cached_requests=tuple(CachedRequest(name, (), computed) for name in chosen),
            num_scheduled_tokens=dict.fromkeys(chosen, 1),
        )
    yield StepPlan(0, finished_request_ids=frozenset(names))
