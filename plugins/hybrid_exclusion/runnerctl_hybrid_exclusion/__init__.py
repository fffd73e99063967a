"""Keeps hybrid and attention-free models off V2 by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerctl import BUILTIN, Discourage, hookimpl

if TYPE_CHECKING:
    from runnerctl import EngineConfig


@hookimpl
def select_runner(config: EngineConfig) -> Discourage | None:
    """Discourage v2 where layers carry recurrent state."""
    facts = config.facts
    if facts is None or not (facts.is_hybrid or facts.is_attention_free):
        return None
    kind = "a hybrid" if facts.is_hybrid else "an attention-free"
    return Discourage("v2", f"{kind} model is not served by v2 by default", BUILTIN)
