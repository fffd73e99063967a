"""V2's policy: it votes for itself on models that generate text.

Whether V2 *can* serve a model is not said here: the host compares what a runner offers
with what a configuration needs. Other plugins cancel this vote where V2 should not be
the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerctl import BUILTIN, Vote, hookimpl

if TYPE_CHECKING:
    from runnerctl import EngineConfig


@hookimpl
def select_runner(config: EngineConfig) -> Vote | None:
    """Vote for v2 on generate models; pooling models are left to the fallback."""
    if config.facts is None or config.facts.runner_type != "generate":
        return None
    return Vote("v2", "v2 is the default for models that generate text", BUILTIN)
