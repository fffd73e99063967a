"""Attention through PyTorch's `scaled_dot_product_attention`, request by request.

Runs everywhere. On a CPU these are PyTorch's own flash kernels. Softcap has no
place in them, so layers that need it take an explicit path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from runnerctl.runner.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    LayerKVCache,
)


@dataclass(frozen=True, slots=True)
class SdpaRequest:
    """One request of a step.

    Attributes:
        start, end: its query tokens in the packed batch.
        seq_len: its tokens in all, the query tokens being the last of them.
        block_ids: [number of blocks that hold seq_len tokens], int64.
    """

    start: int
    end: int
    seq_len: int
    block_ids: torch.Tensor


class SdpaBackend(AttentionBackend[list[SdpaRequest]]):
    """See the module's docstring."""

    name = "sdpa"

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    @classmethod
    def why_not(
        cls, layer: AttentionLayer, device: torch.device, dtype: torch.dtype, block_size: int
    ) -> str | None:
        """Serves every layer on every device."""
        return None

    def prepare(self, batch: AttentionBatch) -> list[SdpaRequest]:
        """Cut the batch into requests."""
        bounds = batch.query_start_loc_np.tolist()
        requests = []
        for i, seq_len in enumerate(batch.seq_lens_np.tolist()):
            num_blocks = -(-seq_len // self._block_size)
            block_ids = batch.block_table[i, :num_blocks]
            requests.append(SdpaRequest(bounds[i], bounds[i + 1], seq_len, block_ids))
        return requests

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerKVCache,
        layer: AttentionLayer,
        metadata: list[SdpaRequest],
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        output = query.new_empty(query.shape[0], layer.num_heads, layer.head_size_v)
        for request in metadata:
            rows = slice(request.start, request.end)
            if request.seq_len == request.end - request.start:
                keys, values = key[rows], value[rows]
            else:
                keys, values = _gather(cache, request, layer.sliding_window)
            output[rows] = _attend(query[rows], keys, values, layer)
        return output


def _gather(
    cache: LayerKVCache, request: SdpaRequest, sliding_window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a request, [S, num_kv_heads, head size]; only what its queries can see."""
    # index_select rather than [ ]: the same copy at a fifth of the cost per call on a CPU
    keys = cache.key.index_select(0, request.block_ids).flatten(0, 1)[: request.seq_len]
    values = cache.value.index_select(0, request.block_ids).flatten(0, 1)[: request.seq_len]
    if sliding_window is not None:
        num_queries = request.end - request.start
        first = max(0, request.seq_len - num_queries - sliding_window + 1)
        keys, values = keys[first:], values[first:]
    return keys, values


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionLayer
) -> torch.Tensor:
    """One request: query [Q, H, D] over keys and values [S, Hkv, D], aligned at the end."""
    num_queries, num_keys = query.shape[0], keys.shape[0]
    keys, values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    mask, is_causal = None, False
    if num_queries == 1:
        # The heads that share a KV head see the same keys: the rows of one small matrix.
        query = query.view(1, layer.num_kv_heads, -1, layer.head_size)
    else:
        query = query.transpose(0, 1).unsqueeze(0)
        window = layer.sliding_window
        is_causal = num_queries == num_keys and (window is None or num_keys <= window)
        if not is_causal:
            mask = _mask(num_queries, num_keys, window, query.device)
    if layer.softcap is not None:
        if is_causal:
            mask = _mask(num_queries, num_keys, None, query.device)
        out = _softcapped_attention(query, keys, values, layer, mask)
    else:
        out = scaled_dot_product_attention(
            query, keys, values, mask, is_causal=is_causal, scale=layer.scale, enable_gqa=True
        )
    if num_queries == 1:
        return out.view(1, layer.num_heads, layer.head_size_v)
    return out.squeeze(0).transpose(0, 1)


def _mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[Q, S], True where a query may look: causal, aligned at the end, within the window."""
    last = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    position = torch.arange(num_keys, device=device)
    mask = position <= last
    if window is not None:
        mask &= position > last - window
    return mask


def _softcapped_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: AttentionLayer,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with capped scores, written out; softmax in float32."""
    assert layer.softcap is not None
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = (query @ keys.transpose(-1, -2)).float() * layer.scale
    scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1).to(values.dtype) @ values
