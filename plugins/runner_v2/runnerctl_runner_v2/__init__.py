"""V2's policy: it votes for itself on models that generate text.

Whether V2 *can* serve a model is not said here: the host compares what a runner offers
with what a configuration needs. Other plugins cancel this vote where V2 should not be
the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerctl import BUILTIN, RunnerSpec, Vote, hookimpl

if TYPE_CHECKING:
    from runnerctl import EngineConfig


@hookimpl
def register_runners() -> list[RunnerSpec]:
    """Provide v2."""
    return [
        RunnerSpec(
            name="v2",
            factory="runnerctl_runner_v2.runner:ModelRunnerV2",
            # Dense models and every mixture of experts that v1 can serve; which of those by
            # default is other plugins' business.
            capabilities=frozenset({"generate", "moe", "mla"}),
            resumes_as_new=True,
            concurrent_batches=2,
        )
    ]


@hookimpl
def select_runner(config: EngineConfig) -> Vote | None:
    """Vote for v2 on generate models; pooling models are left to the fallback."""
    if config.facts is None or config.facts.runner_type != "generate":
        return None
    return Vote("v2", "v2 is the default for models that generate text", BUILTIN)
