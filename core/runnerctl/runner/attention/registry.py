"""Which attention backends there are, and which one serves a model here.

No torch at import: `explain` looks at the table before anything is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from runnerctl.errors import PluginError, UserError
from runnerctl.runner.attention import prechecks
from runnerctl.runner.attention.spec import AttentionBackendSpec, RegisteredBackend
from runnerctl.suggest import block_flag, did_you_mean

if TYPE_CHECKING:
    import torch

    from runnerctl.runner.attention.base import AttentionBackend, AttentionLayer

logger = logging.getLogger(__name__)

Backends = Mapping[str, RegisteredBackend]
"""By name, in the order in which `auto` tries them: `PluginHost.attention_backends`."""

_HERE = "runnerctl.runner.attention"
BUILTIN_BACKENDS = (
    AttentionBackendSpec(
        "flash_attn",
        f"{_HERE}.flash_attn:FlashAttnBackend",
        priority=-10,
        precheck=prechecks.flash_attn,
    ),
    AttentionBackendSpec(
        "torch_flash",
        f"{_HERE}.torch_flash:TorchFlashBackend",
        priority=-20,
        precheck=prechecks.torch_flash,
    ),
    AttentionBackendSpec("sdpa", f"{_HERE}.sdpa:SdpaBackend", priority=-30),
)


def in_order(backends: Iterable[RegisteredBackend]) -> dict[str, RegisteredBackend]:
    """A table in the order in which `auto` tries it: by priority, then by name."""
    ordered = sorted(backends, key=lambda backend: (-backend.spec.priority, backend.spec.name))
    return {backend.spec.name: backend for backend in ordered}


def load_backend(backend: RegisteredBackend) -> type[AttentionBackend[Any]]:
    """The class of a backend; imports torch.

    Raises:
        PluginError: the factory does not import, or is no backend of that name.
    """
    from runnerctl.runner.attention.base import AttentionBackend

    spec = backend.spec
    module, _, attribute = spec.factory.partition(":")
    try:
        made = getattr(import_module(module), attribute)
    except Exception as error:  # a module may raise anything at import
        raise _broken(backend, f"{spec.factory} does not import ({error})") from error
    if not (isinstance(made, type) and issubclass(made, AttentionBackend)):
        raise _broken(backend, f"{spec.factory} is no subclass of AttentionBackend")
    if getattr(made, "name", None) != spec.name:
        raise _broken(backend, f"{spec.factory} calls itself {getattr(made, 'name', None)!r}")
    return made


def check_backend_name(name: str, backends: Backends, setting: str) -> None:
    """See to it that a backend of this name exists, or that it is `auto`.

    Raises:
        UserError: there is none; names those there are.
    """
    if name != "auto" and name not in backends:
        raise UserError(
            f"no attention backend is called {name!r}{did_you_mean(name, backends)}",
            remedy=f"there are: auto, {', '.join(backends)}",
            setting=setting,
        )


def choose_backend(
    name: str,
    layers: Sequence[AttentionLayer],
    *,
    backends: Backends,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    setting: str,
    allow_compiled: bool = False,
) -> type[AttentionBackend[Any]]:
    """The backend called `name`, or for `auto` the first that serves all layers.

    Args:
        name: as the user set it.
        layers: of the model, as the dry run saw them.
        backends: the host's table, `context.plugins.attention_backends`.
        device, dtype: where and in what the model computes.
        block_size: tokens per block of the cache.
        setting: how the user spelled the choice, for messages.
        allow_compiled: `auto` may take a backend that builds native code at first use.

    Raises:
        UserError: no such backend, or it cannot serve a layer of this model here.
        PluginError: a backend that had its turn is broken; says whose it is.
    """
    check_backend_name(name, backends, setting)
    reasons = []
    for candidate in backends if name == "auto" else (name,):
        backend = backends[candidate]
        if name == "auto" and backend.spec.compiles and not allow_compiled:
            reasons.append(f"{candidate}: it builds native code, which this runner does not allow")
            continue
        made = load_backend(backend)
        why_not = _why_not(backend, made, layers, (device, dtype, block_size))
        if why_not is None:
            logger.info("attention backend %s; passed over: %s", candidate, reasons or "none")
            return made
        reasons.append(f"{candidate}: {why_not}")
    raise UserError(
        "no attention backend serves this model here: " + "; ".join(reasons),
        remedy="use --attention-backend auto or another --dtype",
        setting=setting,
    )


def _why_not(
    backend: RegisteredBackend,
    made: type[AttentionBackend[Any]],
    layers: Sequence[AttentionLayer],
    place: tuple[torch.device, torch.dtype, int],
) -> str | None:
    """What the first layer that is declined is declined for."""
    try:
        return next(filter(None, (made.why_not(layer, *place) for layer in layers)), None)
    except Exception as error:  # a third party's code, which is to be named
        raise _broken(backend, f"its why_not raised {type(error).__name__}: {error}") from error


def _broken(backend: RegisteredBackend, why: str) -> PluginError:
    remedy = "choose another with --attention-backend"
    if backend.plugin:
        remedy = f"block the plugin with {block_flag(backend.plugin)}, or {remedy}"
    return PluginError(
        f"attention backend {backend.spec.name!r}{backend.owner} cannot be used: {why}",
        remedy=remedy,
    )
