"""Paged attention as one opaque operator, for models that are compiled layer by layer.

The compiler sees queries, keys and values go in and the output come out; caches and
metadata stay behind a handle, a tensor that each layer carries. As a tensor it is an
input of the compiled code: one compiled layer serves all layers that are alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count

import torch
from torch import nn

Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_LIBRARY = torch.library.Library("runnerctl", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor handle) -> Tensor"
)

_HANDLES = count()
_LAYERS: dict[int, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {}


def layer_handle(module: nn.Module, attend: Attend) -> torch.Tensor:
    """A handle for a layer, valid while the layer lives.

    Args:
        module: that calls the attention function.
        attend: the method that computes its attention.

    Returns:
        [], int64, on the host.
    """
    number = next(_HANDLES)
    of_module, of_method = weakref.ref(module), weakref.WeakMethod(attend)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        layer, method = of_module(), of_method()
        if layer is None or method is None:
            raise RuntimeError("attention of a model that was closed")
        return method(layer, query, key, value)

    _LAYERS[number] = run
    weakref.finalize(module, _LAYERS.pop, number, None)
    return torch.tensor(number)


def paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor
) -> torch.Tensor:
    """`PagedAttention.attend` of the layer behind `handle`; shapes as there."""
    output: torch.Tensor = torch.ops.runnerctl.paged_attention(query, key, value, handle)
    return output


def _run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor
) -> torch.Tensor:
    return _LAYERS[int(handle)](query, key, value)


def _shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


_LIBRARY.impl("paged_attention", _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("runnerctl::paged_attention", _shape, lib=_LIBRARY)
