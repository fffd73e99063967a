"""A runner under the real engine: what it claims is served, and the text is always the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.runner.spec import CAPABILITIES
from runnerctl.testing.parity import assert_tokens, greedy, make_prompts, reference_tokens, seeded
from runnerctl.testing.runner_under_test import RunnerUnderTest
from runnerctl.testing.tiny_models import OF_CAPABILITY

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM

LENGTHS = (1, 3, 4, 5, 8, 17, 24)
BLOCK_SIZE = 4
# enough for the longest prompt and its answer, and far too little for all of them
SMALL_POOL = 13
SMALL_BUDGET = 7


class EngineContract(RunnerUnderTest):
    """Part of `RunnerConformance`: through `LLM`, on tiny models of what the spec claims."""

    @pytest.mark.parametrize("capability", CAPABILITIES)
    def test_what_it_claims_is_served(
        self, capability: str, tiny_models: Callable[[str], Path]
    ) -> None:
        """Alone, in a batch, from the cache, in chunks and preempted: the reference's tokens."""
        if capability not in self.spec.capabilities:
            pytest.skip(f"the spec does not claim {capability}")
        if capability not in OF_CAPABILITY:
            pytest.skip(f"there is no tiny model here that needs {capability}")
        folder = tiny_models(OF_CAPABILITY[capability])
        params = [greedy(), seeded(1), greedy(), greedy(), seeded(2), greedy(), greedy()]
        prompts = make_prompts(LENGTHS)
        with self._llm(folder) as llm:
            alone = [
                tokens
                for p, s in zip(prompts, params, strict=True)
                for tokens in _generate(llm, [p], [s])
            ]
            _check(folder, prompts, params, alone, "alone")
            _check(folder, prompts, params, _generate(llm, prompts, params), "cached, in a batch")
        with self._llm(folder, enable_prefix_caching=False) as llm:
            _check(folder, prompts, params, _generate(llm, prompts, params), "in a batch")
        with self._llm(folder, max_num_batched_tokens=SMALL_BUDGET) as llm:
            _check(folder, prompts, params, _generate(llm, prompts, params), "in chunks")
        with self._llm(folder, num_gpu_blocks_override=SMALL_POOL, max_model_len=40) as llm:
            _check(folder, prompts, params, _generate(llm, prompts, params), "preempted")
            assert llm.stats().num_preemptions > 0

    def test_seeded_text_does_not_depend_on_the_batch(self, tiny_model: Path) -> None:
        """The same seed says the same alone, among others, and after a preemption."""
        prompts = [make_prompts((9,))[0]] * 6
        params = [seeded(seed) for seed in (1, 2, 3, 1, 2, 3)]
        with self._llm(tiny_model, enable_prefix_caching=False) as llm:
            alone = [_generate(llm, [prompts[0]], [seeded(seed)])[0] for seed in (1, 2, 3)]
            assert len(set(map(tuple, alone))) == 3, "different seeds say the same"
            assert _generate(llm, prompts, params) == alone * 2, "in a batch it is another text"
        with self._llm(tiny_model, num_gpu_blocks_override=SMALL_POOL, max_model_len=40) as llm:
            assert _generate(llm, prompts, params) == alone * 2, "preempted it is another text"
            assert llm.stats().num_preemptions > 0

    def test_the_seed_means_what_it_means_on_every_runner(self, tiny_model: Path) -> None:
        """The noise is that of `runnerctl.runner.noise`: changing the runner keeps the text."""
        prompts = make_prompts((3, 6, 9))
        params = [seeded(-1), seeded(2**62), seeded(0)]
        with self._llm(tiny_model) as llm:
            _check(tiny_model, prompts, params, _generate(llm, prompts, params), "seeded")

    def test_an_aborted_request_leaves_nothing_behind(self, tiny_model: Path) -> None:
        """Neither blocks nor state: those that go on are not disturbed, nor those that follow."""
        prompts = make_prompts((17, 9, 5))
        params = [greedy()] * 3
        with self._llm(tiny_model, max_num_batched_tokens=SMALL_BUDGET) as llm:
            for steps in (1, 2, 5, 9):
                stays = llm.stream({"prompt_token_ids": prompts[0]}, params[0])
                goes = llm.stream([{"prompt_token_ids": p} for p in prompts[1:]], params[1:])
                got = [token for _ in range(steps) for token in next(stays).token_ids]
                next(goes)
                _close(goes)
                got += [token for delta in stays for token in delta.token_ids]
                _check(tiny_model, prompts[:1], params[:1], [got], f"after {steps} deltas")
                _check_idle(llm)
            _check(tiny_model, prompts, params, _generate(llm, prompts, params), "afterwards")

    @contextmanager
    def _llm(self, folder: Path, **settings: Any) -> Iterator[LLM]:
        """An engine that is shut down in any case, and that must be idle at the end."""
        from runnerctl.engine.llm import LLM

        values = {"block_size": BLOCK_SIZE, **self.settings, **settings}
        with LLM.from_resolved(self._resolved(folder, **values)) as llm:
            yield llm
            _check_idle(llm)


def _generate(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _check(
    folder: Path,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    said: Sequence[list[int]],
    how: str,
) -> None:
    for i, (prompt, param, tokens) in enumerate(zip(prompts, params, said, strict=True)):
        what = f"{folder.name}, {how}, prompt {i} of {len(prompt)} tokens"
        assert len(tokens) == param.max_tokens, f"{what}: {len(tokens)} tokens"
        assert_tokens(tokens, reference_tokens(folder, prompt, param), what)


def _check_idle(llm: LLM) -> None:
    """No request and no block is held. Not public: only tests look inside."""
    engine = llm._running_engine()
    assert not engine.has_unfinished_requests
    engine.scheduler.pool.check_idle()


def _close(deltas: Iterator[Any]) -> None:
    """Close a stream early, which aborts its requests."""
    close: Any = deltas
    close.close()
