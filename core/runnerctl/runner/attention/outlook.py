"""Which attention backends will be tried, as far as that is known before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerctl.decision import AttentionOutlook
from runnerctl.plugin_checks import GUARDED, explain
from runnerctl.problems import Problem

if TYPE_CHECKING:
    from runnerctl.config import EngineConfig
    from runnerctl.runner.attention.registry import Backends
    from runnerctl.runner.attention.spec import RegisteredBackend


def attention_outlook(config: EngineConfig, backends: Backends) -> tuple[AttentionOutlook, ...]:
    """Every backend, in the order in which `auto` tries them; none for a model without attention.

    The model's layers are not known yet: a worker may still pass over one that is in here.
    """
    if config.facts is not None and config.facts.is_attention_free:
        return ()
    wanted = config.runner.attention_backend
    return tuple(_outlook(config, backend, wanted) for backend in backends.values())


def unavailable_backend(config: EngineConfig, backends: Backends) -> Problem | None:
    """An error if the backend that was asked for by name cannot serve here."""
    name = config.runner.attention_backend
    why = precheck(config, backends[name]) if name in backends else None
    if why is None:
        return None
    setting = config.where("attention_backend")
    return Problem(
        "error",
        f"attention backend {name!r} cannot be used here: {why}",
        remedy="put that right, or let one be chosen with --attention-backend auto",
        setting=setting,
    )


def precheck(config: EngineConfig, backend: RegisteredBackend) -> str | None:
    """What the backend's own `precheck` says; that it is broken, if it is."""
    if backend.spec.precheck is None:
        return None
    try:
        why = backend.spec.precheck(config)
    except GUARDED as error:
        return f"its precheck failed: {explain(error)}"
    return None if why is None else str(why)


def _outlook(config: EngineConfig, backend: RegisteredBackend, wanted: str) -> AttentionOutlook:
    name = backend.spec.name
    note = ""
    if wanted not in ("auto", name):
        why: str | None = f"{config.where('attention_backend')} asks for {wanted}"
    else:
        why = precheck(config, backend)
        if backend.spec.compiles:
            note = "builds native code at first use"
            if wanted == "auto":
                note += "; only for runners that allow it"
    return AttentionOutlook(name, backend.plugin, why or "", note)
