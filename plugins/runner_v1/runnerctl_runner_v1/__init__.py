"""V1: the complete runner, and the fallback. Synchronous, persistent host batch, eager."""

from __future__ import annotations

from runnerctl import RunnerSpec, hookimpl


@hookimpl
def register_runners() -> list[RunnerSpec]:
    """V1 serves whatever no vote decides."""
    return [
        RunnerSpec(
            name="v1",
            factory="runnerctl_runner_v1.runner:ModelRunnerV1",
            capabilities=frozenset({"generate", "moe", "mla"}),
            fallback=True,
        )
    ]
