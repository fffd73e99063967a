"""What the FlashAttention backends share: metadata of a step, and the limits of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from runnerctl.runner.attention.base import AttentionBatch, AttentionLayer

FLASH_DTYPES = (torch.float16, torch.bfloat16)
# FlashAttention 2 reads whole pages of this many tokens, or a multiple of it
PAGE_SIZE_FA2 = 256


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """One step for the kernels; nothing of it is on the host but the two bounds.

    Attributes:
        cu_seqlens_q: [num_reqs + 1], int32; where each request's query tokens begin.
        cu_seqlens_k: [num_reqs + 1], int32; the same of all its tokens, as if not paged.
        seq_lens: [num_reqs], int32; tokens of each request in the cache.
        block_table: [num_reqs, max_blocks], int32, contiguous in the last dimension.
        max_query_len, max_seq_len: upper bounds.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, batch: AttentionBatch) -> FlashMetadata:
        """From a step, without waiting for the device."""
        return cls(
            cu_seqlens_q=batch.query_start_loc,
            cu_seqlens_k=pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU; None for any other device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


def common_why_not(
    layer: AttentionLayer, capability: tuple[int, int] | None, dtype: torch.dtype
) -> str | None:
    """What no FlashAttention kernel takes."""
    if capability is None:
        return "it needs an NVIDIA GPU"
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or more, and this GPU has {dotted(capability)}"
    if dtype not in FLASH_DTYPES:
        return f"it computes in float16 and bfloat16, not in {dtype}".replace("torch.", "")
    return _layer_why_not(layer)


def _layer_why_not(layer: AttentionLayer) -> str | None:
    if layer.sinks is not None:
        return "it is called without attention sinks here"
    if layer.head_size_v != layer.head_size:
        return f"values of {layer.head_size_v} are not as wide as keys of {layer.head_size}"
    if layer.head_size % 8 or not 8 <= layer.head_size <= 256:
        return f"its head sizes are multiples of 8 from 8 to 256, not {layer.head_size}"
    return None


def page_why_not(block_size: int) -> str | None:
    """The pages that FlashAttention 2 takes, with the way out."""
    if block_size % PAGE_SIZE_FA2 == 0:
        return None
    return (
        f"its pages hold a multiple of {PAGE_SIZE_FA2} tokens, not {block_size}; "
        f"pass --block-size {PAGE_SIZE_FA2}"
    )


def window_left(layer: AttentionLayer) -> int:
    """Tokens that a token sees before itself; -1 for all. Our window counts the token too."""
    return -1 if layer.sliding_window is None else layer.sliding_window - 1


def dotted(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it."""
    return f"{capability[0]}.{capability[1]}"
