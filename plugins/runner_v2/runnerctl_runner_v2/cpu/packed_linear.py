"""Linear layers whose weight is stored in the order in which the CPU kernel reads it."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn

from runnerctl_runner_v2.cpu.build import Extension, load_extension
from runnerctl_runner_v2.cpu.onednn_linear import OneDnnLinear, onednn_serves

_DTYPES = (torch.float32, torch.bfloat16)
_INSTRUCTIONS = "which uses this CPU's bfloat16 instructions"


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight; inference only.

    Sums are float32 and in one fixed order: a row's result depends neither on the number of
    rows nor on the number of threads.

    Attributes:
        packed: [panels, in_features, panel_width] elements, in an order that depends on the
            CPU; see packed_linear.cpp.
        bias: [out_features], or None.
        in_features, out_features: as nn.Linear has them.
    """

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self.register_buffer("packed", torch.ops.runnerctl_cpu.pack_linear_weight(weight))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in x's dtype (float32 or bfloat16)."""
        return torch.ops.runnerctl_cpu.packed_linear.default(
            x, self.packed, self.bias, self.out_features
        )

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features]; a fresh copy, for code that looks at it."""
        panels, in_features, width = self.packed.shape
        rows = self.packed
        if rows.dtype == torch.bfloat16 and torch.ops.runnerctl_cpu.dots_bfloat16(in_features):
            rows = rows.view(panels, in_features // 2, width, 2).transpose(2, 3)
            rows = rows.reshape(panels, in_features, width)
        elif rows.dtype == torch.bfloat16:  # stored in pairs of columns
            rows = rows.view(panels, in_features, width // 2, 2).transpose(2, 3)
        rows = rows.reshape(panels, in_features, width).transpose(1, 2)
        return rows.reshape(-1, in_features)[: self.out_features].contiguous()

    def extra_repr(self) -> str:
        """What `print(model)` says."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dtype={self.packed.dtype}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        if fn(self.packed[:0]).dtype != self.packed.dtype:
            raise RuntimeError("the dtype of a packed model cannot change: convert it before")
        return super()._apply(fn, recurse)


def load_packed_linear() -> Extension | str:
    """Make `torch.ops.runnerctl_cpu.packed_linear` callable and traceable.

    Returns:
        The extension, or in one line why there is none.
    """
    extension = load_extension()
    if isinstance(extension, Extension):
        _register_fakes()
    return extension


@functools.cache
def _register_fakes() -> None:
    @torch.library.register_fake("runnerctl_cpu::packed_linear")
    def _(x: torch.Tensor, packed: Any, bias: Any, out_features: int) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], out_features))


def pack_linears(model: nn.Module) -> str | None:
    """Replace every plain `nn.Linear` on the CPU in place, one after the other.

    Subclasses of nn.Linear, layers with hooks or a forward of their own and weights of other
    dtypes than float32 and bfloat16 stay. A weight that is also an embedding (a tied lm_head)
    stays with the embedding and costs its size once more.

    Returns:
        What was done, or why nothing was; None if there is no layer to pack.
    """
    places = _plain_linears(model)
    choices = {dtype: _choose(dtype) for dtype in {linear.weight.dtype for linear in places}}
    done: Counter[str] = Counter()
    with torch.no_grad():
        while places:  # each plain weight is freed before the next is packed
            linear, found_at = places.popitem()
            kind, how = choices[linear.weight.dtype]
            done[how] += 1
            if kind is not None:
                replacement = kind(linear)
                for parent, name in found_at:
                    setattr(parent, name, replacement)
    return "; ".join(f"{count} linear layers {how}" for how, count in done.items()) or None


def _choose(dtype: torch.dtype) -> tuple[type[nn.Module] | None, str]:
    """The class to replace layers with, and what to say about it."""
    extension = load_packed_linear()
    built = isinstance(extension, Extension)
    has_instructions = dtype == torch.bfloat16 and _has_bfloat16_instructions()
    # oneDNN has AMX for many rows, which is worth more than our few rows are
    dots = built and torch.ops.runnerctl_cpu.dots_bfloat16(2) and not _supports("amx_tile")
    if dots and has_instructions:
        return PackedLinear, f"packed for the compiled CPU kernel, {_INSTRUCTIONS}"
    if has_instructions and onednn_serves(dtype):
        return OneDnnLinear, f"packed for oneDNN, {_INSTRUCTIONS}"
    if built:
        return PackedLinear, "packed for the compiled CPU kernel"
    if dtype == torch.float32 and onednn_serves(dtype):
        return OneDnnLinear, f"packed for oneDNN ({extension})"
    return None, f"not packed: {extension}"


def _has_bfloat16_instructions() -> bool:
    """AVX512-BF16 or AMX; on others oneDNN emulates bfloat16 or refuses it."""
    return _supports("avx512_bf16") or _supports("amx_tile")


def _supports(instructions: str) -> bool:
    return bool(getattr(torch.cpu, f"_is_{instructions}_supported", lambda: False)())


def _plain_linears(model: nn.Module) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """The layers to pack, each with every place where it is found."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children leaves out repeated ones
            if child is not None and _is_plain(child):
                places.setdefault(child, []).append((parent, name))
    return places


def _is_plain(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    return (
        weight.device.type == "cpu"
        and type(weight.data) is torch.Tensor
        and weight.dtype in _DTYPES
        and weight.numel() > 0
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)  # whoever put it there would be lost
    )
