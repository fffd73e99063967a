"""Whether this machine has what the ranks need. Asked at the start, never by `explain`."""

from __future__ import annotations

from runnerctl.config import EngineConfig
from runnerctl.errors import UserError
from runnerctl.parallel import ParallelLayout


def check_ranks_fit_machine(config: EngineConfig, layout: ParallelLayout) -> None:
    """See to it that every rank has a GPU, where there are GPUs. Ranks may share a CPU.

    Raises:
        UserError: there are too few; says how many ranks were asked for, by which product.
    """
    import torch

    if not torch.cuda.is_available():
        return
    if layout.world_size > torch.cuda.device_count():
        raise too_many_ranks(config, layout, f"this machine has {torch.cuda.device_count()} GPUs")


def too_many_ranks(config: EngineConfig, layout: ParallelLayout, there_is: str) -> UserError:
    """The refusal of a layout that what `there_is` does not hold."""
    settings = [
        config.where(name)
        for name in ("tensor_parallel_size", "prefill_context_parallel_size")
        if getattr(config.parallel, name) > 1
    ]
    ask = " and ".join(settings) or config.where("distributed_executor_backend")
    return UserError(
        f"{ask} ask for {layout.world_size} ranks ({layout.product}), but {there_is}",
        remedy=f"lower {ask}, or use more machines with --distributed-executor-backend ray",
        setting=ask,
    )
