"""Which attention backends there are, and which one serves a model here.

No torch at import: `explain` checks the name before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from runnerctl.errors import UserError
from runnerctl.suggest import did_you_mean

if TYPE_CHECKING:
    import torch

    from runnerctl.runner.attention.base import AttentionBackend, AttentionLayer

BACKENDS = {"sdpa": "runnerctl.runner.attention.sdpa:SdpaBackend"}
"""Name -> `module:class`, in order of preference: `auto` takes the first that fits."""


def load_backend(name: str) -> type[AttentionBackend[Any]]:
    """The class of a backend; imports torch."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend: type[AttentionBackend[Any]] = getattr(import_module(module), attribute)
    return backend


def check_backend_name(name: str, setting: str) -> None:
    """See to it that a backend of this name exists, or that it is `auto`.

    Raises:
        UserError: there is none; names those there are.
    """
    if name != "auto" and name not in BACKENDS:
        raise UserError(
            f"no attention backend is called {name!r}{did_you_mean(name, BACKENDS)}",
            remedy=f"there are: auto, {', '.join(BACKENDS)}",
            setting=setting,
        )


def choose_backend(
    name: str,
    layers: Sequence[AttentionLayer],
    device: torch.device,
    dtype: torch.dtype,
    *,
    setting: str,
) -> type[AttentionBackend[Any]]:
    """The backend called `name`, or for `auto` the first that serves all layers.

    Args:
        name: as the user set it.
        layers: of the model, as the dry run saw them.
        device, dtype: where and in what the model computes.
        setting: how the user spelled the choice, for messages.

    Raises:
        UserError: no such backend, or it cannot serve a layer of this model here.
    """
    check_backend_name(name, setting)
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        backend = load_backend(candidate)
        why_not = next(filter(None, (backend.why_not(x, device, dtype) for x in layers)), None)
        if why_not is None:
            return backend
        reasons.append(f"{candidate}: {why_not}")
    raise UserError(
        "no attention backend serves this model here: " + "; ".join(reasons),
        remedy="use --attention-backend auto or another --dtype",
        setting=setting,
    )
