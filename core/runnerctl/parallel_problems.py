"""What is wrong with a layout, as far as settings and a model's facts tell. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from runnerctl.config import EngineConfig
from runnerctl.config.tensor_parallel import why_not_tensor_parallel
from runnerctl.parallel import ParallelLayout
from runnerctl.problems import Problem


def parallel_problems(config: EngineConfig) -> Iterator[Problem]:
    """All of them at once, each with the setting at fault."""
    layout = ParallelLayout.of(config)
    if layout.executor == "uni" and layout.world_size > 1:
        where = config.where("distributed_executor_backend")
        yield Problem(
            "error",
            f"{where} is uni, which is one rank in this process, but {_sizes(config)} ask for "
            f"{layout.world_size} ({layout.product})",
            remedy=f"leave {where} out, or set it to mp or ray",
            setting=where,
        )
    size = layout.tensor_parallel_size
    if size > 1 and config.facts is not None:
        why, ways = why_not_tensor_parallel(config.facts, size)
        if why:
            where = config.where("tensor_parallel_size")
            yield Problem(
                "error",
                f"{where} is {size}, but {config.model.model} cannot be shared: {why}",
                remedy="; or ".join(filter(None, (ways, f"set {where} to 1"))),
                setting=where,
            )


def _sizes(config: EngineConfig) -> str:
    names = ("tensor_parallel_size", "prefill_context_parallel_size")
    return " and ".join(
        f"{config.where(name)} {getattr(config.parallel, name)}"
        for name in names
        if getattr(config.parallel, name) > 1
    )
