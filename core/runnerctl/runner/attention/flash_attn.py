"""Attention by the package FlashAttention, over pages: version 4 where it fits, else version 2.

Version 4 (`flash-attn-4`, Dao-AILab/flash-attention, read at 4.0.0b36) takes pages of any
size on compute capability 9 and 10. Version 2 (`flash-attn`, read at 2.8.3) takes pages of a
multiple of 256 tokens from capability 8 on. Both align the causal mask at the last token of
keys and queries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch

from runnerctl.runner.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    LayerKVCache,
)
from runnerctl.runner.attention.flash_common import (
    FlashMetadata,
    common_why_not,
    compute_capability,
    dotted,
    page_why_not,
    window_left,
)


class _Kernel(Protocol):
    """One version of the package."""

    version: int

    def why_not(
        self, layer: AttentionLayer, capability: tuple[int, int], block_size: int
    ) -> str | None: ...

    def __call__(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        layer: AttentionLayer,
        metadata: FlashMetadata,
    ) -> torch.Tensor: ...


class _FlashAttention4:
    version = 4
    needed = ("page_table", "seqused_k", "softcap", "window_size")

    def why_not(
        self, layer: AttentionLayer, capability: tuple[int, int], block_size: int
    ) -> str | None:
        if capability[0] not in (9, 10, 11):
            return f"it pages on compute capability 9 to 11, not on {dotted(capability)}"
        size = layer.head_size
        if capability[0] > 9 and size > 128 and (size, block_size) != (256, 128):
            return (
                f"on compute capability {dotted(capability)} its head sizes go up to 128, or "
                f"256 with --block-size 128, not {size} with {block_size}"
            )
        return _missing("flash_attn.cute", self.needed)

    def __call__(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        layer: AttentionLayer,
        metadata: FlashMetadata,
    ) -> torch.Tensor:
        left = None if layer.sliding_window is None else window_left(layer)
        output = _function("flash_attn.cute")(
            query,
            cache.key,
            cache.value,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            seqused_k=metadata.seq_lens,
            page_table=metadata.block_table,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(left, None if left is None else 0),
            softcap=layer.softcap or 0.0,
        )
        return _first(output)


class _FlashAttention2:
    version = 2
    needed = ("block_table", "softcap", "window_size")

    def why_not(
        self, layer: AttentionLayer, capability: tuple[int, int], block_size: int
    ) -> str | None:
        return page_why_not(block_size) or _missing("flash_attn", self.needed)

    def __call__(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        layer: AttentionLayer,
        metadata: FlashMetadata,
    ) -> torch.Tensor:
        left = window_left(layer)
        output = _function("flash_attn")(
            query,
            cache.key,
            cache.value,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(left, -1 if left < 0 else 0),
            softcap=layer.softcap or 0.0,
            block_table=metadata.block_table,
        )
        return _first(output)


_KERNELS: tuple[_Kernel, ...] = (_FlashAttention4(), _FlashAttention2())


class FlashAttnBackend(AttentionBackend[FlashMetadata]):
    """See the module's docstring."""

    name = "flash_attn"
    capturable = True
    needs_finite_cache = True

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._kernels: dict[AttentionLayer, _Kernel] = {}

    @classmethod
    def why_not(
        cls, layer: AttentionLayer, device: torch.device, dtype: torch.dtype, block_size: int
    ) -> str | None:
        """Reasons of both versions, if neither fits."""
        chosen = _choose(layer, device, dtype, block_size)
        return chosen if isinstance(chosen, str) else None

    def prepare(self, batch: AttentionBatch) -> FlashMetadata:
        """What the kernels take, all on the device."""
        return FlashMetadata.of(batch)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerKVCache,
        layer: AttentionLayer,
        metadata: FlashMetadata,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        kernel = self._kernels.get(layer)
        if kernel is None:
            chosen = _choose(layer, query.device, query.dtype, self.block_size)
            if isinstance(chosen, str):
                raise RuntimeError(f"flash_attn cannot serve layer {layer.layer_idx}: {chosen}")
            kernel = self._kernels[layer] = chosen
        return kernel(query, cache, layer, metadata)


def _choose(
    layer: AttentionLayer, device: torch.device, dtype: torch.dtype, block_size: int
) -> _Kernel | str:
    """The newest version that serves a layer here, or why none does."""
    capability = compute_capability(device)
    why = common_why_not(layer, capability, dtype)
    if why is not None or capability is None:
        return why or ""
    reasons = []
    for kernel in _KERNELS:
        why_not = kernel.why_not(layer, capability, block_size)
        if why_not is None:
            return kernel
        reasons.append(f"FlashAttention {kernel.version}: {why_not}")
    return "; ".join(reasons)


def _function(module: str) -> Callable[..., Any]:
    function: Callable[..., Any] = import_module(module).flash_attn_varlen_func
    return function


def _missing(module: str, needed: tuple[str, ...]) -> str | None:
    """Why a module has no function that takes what is needed; None if it has."""
    try:
        parameters = inspect.signature(_function(module)).parameters
    except ModuleNotFoundError as error:
        is_itself = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        return "it is not installed" if is_itself else f"it does not import: {error}"
    except Exception as error:  # a build for another torch or CUDA may raise anything
        return f"it does not import: {type(error).__name__}: {error}"
    lacking = [name for name in needed if name not in parameters]
    return f"the installed one is too old: it takes no {', '.join(lacking)}" if lacking else None


def _first(output: Any) -> torch.Tensor:
    """The output alone, where a version returns the log-sum-exp beside it."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor
