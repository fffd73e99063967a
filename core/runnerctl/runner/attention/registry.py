"""Which attention backend serves a model here."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch

from runnerctl.errors import UserError
from runnerctl.runner.attention.base import AttentionBackend, AttentionLayer
from runnerctl.runner.attention.sdpa import SdpaBackend

# In order of preference: `auto` takes the first that serves every layer.
BACKENDS: tuple[type[AttentionBackend[Any]], ...] = (SdpaBackend,)


def choose_backend(
    name: str,
    layers: Sequence[AttentionLayer],
    device: torch.device,
    dtype: torch.dtype,
    *,
    setting: str = "--attention-backend",
) -> type[AttentionBackend[Any]]:
    """The backend called `name`, or for `auto` the first that serves all layers.

    Args:
        setting: how the user spelled the choice, for messages.

    Raises:
        UserError: no such backend, or it cannot serve a layer of this model here.
    """
    known = {backend.name: backend for backend in BACKENDS}
    if name != "auto" and name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(
            f"no attention backend is called {name!r}",
            remedy=f"{hint}There are: auto, {', '.join(known)}",
            setting=setting,
        )
    reasons = []
    for backend in BACKENDS if name == "auto" else (known[name],):
        why_not = next(filter(None, (backend.why_not(x, device, dtype) for x in layers)), None)
        if why_not is None:
            return backend
        reasons.append(f"{backend.name}: {why_not}")
    raise UserError(
        "no attention backend serves this model here: " + "; ".join(reasons),
        remedy="use --attention-backend auto or another --dtype",
        setting=setting,
    )
