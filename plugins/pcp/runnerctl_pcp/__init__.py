"""Prefill context parallelism: the tokens of each prefill are shared among ranks.

It requires v2, says what does not fit it, and brings the batch transform that splits v2's
steps (`split.py`, `share.py`). The runner knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runnerctl import BatchTransformSpec, Problem, Require, hookimpl

if TYPE_CHECKING:
    from runnerctl import Decision, EngineConfig

SETTING = "prefill_context_parallel_size"


@hookimpl
def register_batch_transforms() -> list[BatchTransformSpec]:
    """Give v2 the capability `pcp`."""
    return [BatchTransformSpec("pcp", "pcp", {"v2"}, "runnerctl_pcp.share:PrefillSplit")]


@hookimpl
def select_runner(config: EngineConfig) -> Require | None:
    """Require v2 as soon as a prefill is split over ranks."""
    size = config.parallel.prefill_context_parallel_size
    if size == 1:
        return None
    where = config.where(SETTING)
    return Require(
        "v2", f"prefill context parallelism is on: {where} is {size}", f"set {where} to 1"
    )


@hookimpl
def validate_config(config: EngineConfig, decision: Decision) -> Iterator[Problem]:
    """Refuse more ranks than one step has tokens to give them."""
    size = config.parallel.prefill_context_parallel_size
    budget = config.scheduler.max_num_batched_tokens
    if size > budget:
        where, tokens = config.where(SETTING), config.where("max_num_batched_tokens")
        yield Problem(
            "error",
            f"a step of at most {budget} tokens cannot be split over {size} ranks",
            remedy=f"lower {where} or raise {tokens}",
            setting=where,
        )
