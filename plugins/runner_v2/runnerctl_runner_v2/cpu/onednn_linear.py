"""Linear layers packed by oneDNN, as torch ships it: no compiler is needed."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from torch import nn

_ROWS = 16  # the number of rows that oneDNN chooses its layout for
_numbers = itertools.count()
_weights: dict[int, torch.Tensor] = {}


class OneDnnLinear(nn.Module):
    """`nn.Linear` with a weight in oneDNN's own layout; inference only.

    torch cannot trace tensors of that layout. So the weight lies outside of the module, and
    a traced call is given its number, as a tensor: all layers of a shape share one trace.

    Attributes:
        bias: [out_features], or None.
        in_features, out_features: as nn.Linear has them.
    """

    bias: torch.Tensor | None
    number: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        _register_operator()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        number = next(_numbers)
        self._weight = _weights[number] = _pack(linear.weight.detach())
        weakref.finalize(self, _weights.pop, number)
        self.register_buffer("number", torch.tensor(number))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], both in the weight's dtype."""
        if torch.compiler.is_compiling():
            return torch.ops.runnerctl_onednn.linear(x, self.number, self.bias, self.out_features)
        return _multiply(x, self._weight, self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features]; a fresh copy, for code that looks at it."""
        return self._weight.to_dense()

    def _apply(self, fn: Any, recurse: bool = True) -> OneDnnLinear:
        if fn(torch.empty(0, dtype=self._weight.dtype)).dtype != self._weight.dtype:
            raise RuntimeError("the dtype of a packed model cannot change: convert it before")
        return super()._apply(fn, recurse)


@functools.cache
def onednn_serves(dtype: torch.dtype) -> bool:
    """Whether this torch packs weights of a dtype on this CPU; tried out on a small one."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        with torch.inference_mode():
            _multiply(torch.ones(1, 16, dtype=dtype), _pack(torch.ones(16, 16, dtype=dtype)), None)
    except (RuntimeError, AttributeError):  # refused, or an operator that this torch lacks
        return False
    return True


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def _register_operator() -> None:
    def linear(x: torch.Tensor, number: torch.Tensor, bias: Any, out_features: int) -> torch.Tensor:
        return _multiply(x, _weights[int(number)], bias)

    def fake(x: torch.Tensor, number: Any, bias: Any, out_features: int) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], out_features))

    name = "runnerctl_onednn::linear"
    torch.library.define(
        name, "(Tensor x, Tensor number, Tensor? bias, int out_features) -> Tensor"
    )
    torch.library.impl(name, "CPU", linear)
    torch.library.register_fake(name, fake)
