"""V1: the complete runner, and the fallback. Synchronous, persistent host batch, eager."""

from __future__ import annotations

from collections.abc import Iterator

from runnerctl import Decision, EngineConfig, Problem, RunnerSpec, hookimpl


@hookimpl
def register_runners() -> list[RunnerSpec]:
    """V1 serves whatever no vote decides."""
    return [
        RunnerSpec(
            name="v1",
            factory="runnerctl_runner_v1.factory:make_runner",
            capabilities=frozenset(
                {"generate", "pooling", "moe", "mla", "hybrid", "attention_free", "unpaged", "tp"}
            ),
            fallback=True,
        )
    ]


# What a text that is read once, whole, has no use for.
_NOT_FOR_POOLING = (
    "attention_backend",
    "block_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "enable_prefix_caching",
)


@hookimpl
def validate_config(config: EngineConfig, decision: Decision) -> Iterator[Problem]:
    """Say what V1 makes nothing of."""
    if decision.runner == "v1" and config.runner.enforce_eager:
        where = config.where("enforce_eager")
        text = f"v1 itself is always eager; {where} only keeps plugins from compiling the model"
        yield Problem("note", text, setting=where)
    facts = decision.facts
    if decision.runner == "v1" and facts is not None and facts.runner_type == "pooling":
        for name in _NOT_FOR_POOLING:
            origin = config.origin(name)
            if origin.source != "default":
                text = "has no part in pooling models, which v1 runs without a cache"
                yield Problem("note", f"{origin.setting} {text}", setting=origin.setting)
