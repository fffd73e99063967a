"""Attention by the FlashAttention that PyTorch ships: `torch.nn.attention.varlen`, over pages.

The kernel under it is FlashAttention 2, which takes pages of a multiple of 256 tokens, unless
another was put there with `torch.nn.attention.activate_flash_attention_impl`. There is no
softcap. `block_table` is in torch 2.13; older ones are declined by their signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

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
    page_why_not,
    window_left,
)

_NEEDED = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table")


class TorchFlashBackend(AttentionBackend[FlashMetadata]):
    """See the module's docstring."""

    name = "torch_flash"
    capturable = True
    needs_finite_cache = True

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._function = _varlen_attn()

    @classmethod
    def why_not(
        cls, layer: AttentionLayer, device: torch.device, dtype: torch.dtype, block_size: int
    ) -> str | None:
        """The limits of FlashAttention 2, those of torch's interface to it, and its version."""
        why = common_why_not(layer, compute_capability(device), dtype)
        if why is None and layer.softcap is not None:
            why = "torch's varlen_attn has no softcap"
        return why or _missing() or page_why_not(block_size)

    def prepare(self, batch: AttentionBatch) -> FlashMetadata:
        """What the kernel takes, all on the device."""
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
        output: torch.Tensor = self._function(
            query,
            cache.key,
            cache.value,
            metadata.cu_seqlens_q,
            metadata.cu_seqlens_k,
            metadata.max_query_len,
            metadata.max_seq_len,
            scale=layer.scale,
            # a right side of 0 makes it causal
            window_size=(window_left(layer), 0),
            enable_gqa=layer.num_heads != layer.num_kv_heads,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
        )
        return output


def _varlen_attn() -> Callable[..., Any]:
    function: Callable[..., Any] = import_module("torch.nn.attention.varlen").varlen_attn
    return function


def _missing() -> str | None:
    try:
        parameters = inspect.signature(_varlen_attn()).parameters
    except (ImportError, AttributeError):
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    lacking = [name for name in _NEEDED if name not in parameters]
    if not lacking:
        return None
    return f"varlen_attn of torch {torch.__version__} takes no {', '.join(lacking)}"
