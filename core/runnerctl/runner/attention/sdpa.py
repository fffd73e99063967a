"""Attention through PyTorch's `scaled_dot_product_attention`.

Runs everywhere. On a CPU these are PyTorch's own flash kernels. Requests that decode go
together, padded to the longest; the others one by one. Softcap and sinks have no place in
those kernels, so layers that need them take an explicit path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """A request with several query tokens.

    Attributes:
        start, end: its query tokens in the packed batch.
        seq_len: its tokens in all, the query tokens being the last of them.
        block_ids: [number of blocks that hold seq_len tokens], integers.
    """

    start: int
    end: int
    seq_len: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class PaddedKeys:
    """Where the keys of some decoding requests are, for one sliding window.

    Attributes:
        slots: [num_reqs * num_keys], int64; of a request's keys in order, then of its own
            first one over and over: padding reads nobody else's and nothing unwritten.
        mask: [num_reqs, 1, 1, num_keys], bool; False where there is padding. None if
            there is none.
    """

    slots: torch.Tensor
    mask: torch.Tensor | None
    _buffers: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def gather(self, name: str, pages: torch.Tensor) -> torch.Tensor:
        """[num_reqs * num_keys, num_kv_heads, head size] of a cache, valid until the next layer.

        Into memory kept for the step: an allocator that gives megabytes back to the system
        after each layer makes it spend more time on fresh pages than on attention.
        """
        place = (name, pages.shape[2:], pages.dtype)
        if place not in self._buffers:
            self._buffers[place] = pages.new_empty(self.slots.shape[0], *pages.shape[2:])
        # index_select rather than [ ]: the same copy at a fifth of the cost per call on a CPU
        return torch.index_select(pages.flatten(0, 1), 0, self.slots, out=self._buffers[place])


@dataclass(frozen=True, slots=True)
class SdpaDecodes:
    """Requests with one query token each, of similar lengths.

    Attributes:
        rows: [num_reqs], int64; their query tokens in the packed batch.
        seq_lens: [num_reqs], integers.
        longest, shortest: the largest and the smallest of them.
        block_table: [num_reqs, max_blocks], integers.
        block_size: tokens per block.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    longest: int
    shortest: int
    block_table: torch.Tensor
    block_size: int
    _by_window: dict[int | None, PaddedKeys] = field(default_factory=dict)

    def keys(self, window: int | None) -> PaddedKeys:
        """The same for all layers of a step that have this window, so computed once."""
        found = self._by_window.get(window)
        if found is None:
            found = self._by_window[window] = self._keys(window)
        return found

    def _keys(self, window: int | None) -> PaddedKeys:
        num_keys = self.longest if window is None else min(self.longest, window)
        lengths = self.seq_lens.long().unsqueeze(1)
        first = (lengths - num_keys).clamp(min=0)
        positions = first + torch.arange(num_keys, device=lengths.device)
        is_key = positions < lengths
        positions = torch.where(is_key, positions, first)
        blocks = self.block_table.long().gather(1, positions // self.block_size)
        slots = blocks * self.block_size + positions % self.block_size
        mask = is_key[:, None, None] if self.shortest < num_keys else None
        return PaddedKeys(slots.flatten(), mask)


@dataclass(frozen=True, slots=True)
class SdpaMetadata:
    """One step's requests: groups of those that decode, and the others."""

    decodes: tuple[SdpaDecodes, ...]
    others: tuple[SdpaRequest, ...]


# A group of decoding requests is padded to its longest: none is shorter than this part of it.
_SHORTEST = 0.5


class SdpaBackend(AttentionBackend[SdpaMetadata]):
    """See the module's docstring."""

    name = "sdpa"

    @classmethod
    def why_not(
        cls, layer: AttentionLayer, device: torch.device, dtype: torch.dtype, block_size: int
    ) -> str | None:
        """Serves every layer on every device."""
        return None

    def prepare(self, batch: AttentionBatch, chosen: Sequence[int] | None = None) -> SdpaMetadata:
        """Cut the batch into requests and groups of them.

        Args:
            chosen: serve only these requests of the batch. Default: all.
        """
        bounds = batch.query_start_loc_np.tolist()
        seq_lens = batch.seq_lens_np.tolist()
        decodes, others = [], []
        for i in range(len(seq_lens)) if chosen is None else chosen:
            if bounds[i + 1] - bounds[i] == 1:
                decodes.append(i)
                continue
            block_ids = batch.block_table[i, : -(-seq_lens[i] // self.block_size)]
            others.append(SdpaRequest(bounds[i], bounds[i + 1], seq_lens[i], block_ids))
        decodes.sort(key=lambda i: -seq_lens[i])
        groups: list[list[int]] = []
        for i in decodes:
            if not groups or seq_lens[i] < _SHORTEST * seq_lens[groups[-1][0]]:
                groups.append([])
            groups[-1].append(i)
        return SdpaMetadata(
            tuple(self._group(batch, group, [seq_lens[i] for i in group]) for group in groups),
            tuple(others),
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerKVCache,
        layer: AttentionLayer,
        metadata: SdpaMetadata,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        output = query.new_empty(query.shape[0], layer.num_heads, layer.head_size_v)
        self.write_output(output, (query, key, value), cache, layer, metadata)
        return output

    def write_output(
        self,
        output: torch.Tensor,
        query_key_value: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: LayerKVCache,
        layer: AttentionLayer,
        metadata: SdpaMetadata,
    ) -> None:
        """As `forward`, into the rows of `output` that belong to the metadata's requests."""
        query, key, value = query_key_value
        for group in metadata.decodes:
            output.index_copy_(0, group.rows, _decode(query[group.rows], cache, layer, group))
        for request in metadata.others:
            rows = slice(request.start, request.end)
            if request.seq_len == request.end - request.start:
                keys, values = key[rows], value[rows]
            else:
                keys, values = _gather(cache, request, layer.sliding_window)
            output[rows] = attend(query[rows], keys, values, layer)

    def _group(self, batch: AttentionBatch, group: list[int], lengths: list[int]) -> SdpaDecodes:
        places = torch.tensor(group, device=batch.block_table.device)
        return SdpaDecodes(
            rows=batch.query_start_loc.index_select(0, places).long(),
            seq_lens=batch.seq_lens.index_select(0, places),
            longest=lengths[0],
            shortest=lengths[-1],
            block_table=batch.block_table.index_select(0, places),
            block_size=self.block_size,
        )


def _decode(
    query: torch.Tensor, cache: LayerKVCache, layer: AttentionLayer, group: SdpaDecodes
) -> torch.Tensor:
    """One query per request: [num_reqs, num_heads, head_size] to [.., head_size_v]."""
    num_reqs = query.shape[0]
    padded = group.keys(layer.sliding_window)

    keys, values = (
        rows.view(num_reqs, -1, *rows.shape[1:]).transpose(1, 2)
        for rows in (padded.gather("key", cache.key), padded.gather("value", cache.value))
    )
    # The heads that share a KV head see the same keys: the rows of one small matrix.
    query = query.view(num_reqs, layer.num_kv_heads, -1, layer.head_size)
    if is_written_out(layer):
        out = _written_out(query, keys, values, layer, padded.mask)
    else:
        out = scaled_dot_product_attention(query, keys, values, padded.mask, scale=layer.scale)
    return out.reshape(num_reqs, layer.num_heads, layer.head_size_v)


def _gather(
    cache: LayerKVCache, request: SdpaRequest, sliding_window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a request, [S, num_kv_heads, head size]; only what its queries can see."""
    keys = cache.key.index_select(0, request.block_ids).flatten(0, 1)[: request.seq_len]
    values = cache.value.index_select(0, request.block_ids).flatten(0, 1)[: request.seq_len]
    if sliding_window is not None:
        num_queries = request.end - request.start
        first = max(0, request.seq_len - num_queries - sliding_window + 1)
        keys, values = keys[first:], values[first:]
    return keys, values


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionLayer
) -> torch.Tensor:
    """One request, without a cache: causal, aligned at the end.

    Args:
        query: [num_queries, num_heads, head_size].
        keys, values: [num_keys, num_kv_heads, head_size (_v)], contiguous in time.
        layer: its constants.

    Returns:
        [num_queries, num_heads, head_size_v].
    """
    num_queries, num_keys = query.shape[0], keys.shape[0]
    keys, values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    query = query.transpose(0, 1).unsqueeze(0)
    window = layer.sliding_window
    is_causal = num_queries == num_keys and (window is None or num_keys <= window)
    mask = None if is_causal else _mask(num_queries, num_keys, window, query.device)
    if is_written_out(layer):
        if is_causal:
            mask = _mask(num_queries, num_keys, None, query.device)
        out = _written_out(query, keys, values, layer, mask)
    else:
        out = scaled_dot_product_attention(
            query, keys, values, mask, is_causal=is_causal, scale=layer.scale, enable_gqa=True
        )
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


def is_written_out(layer: AttentionLayer) -> bool:
    """True if PyTorch's kernels cannot compute this layer."""
    return layer.softcap is not None or layer.sinks is not None


def _written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: AttentionLayer,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with capped scores or sinks; softmax in float32.

    Args:
        query: [num_reqs, num_heads, Q, head_size]; or, of one query per request, the heads
            of a group in the place of queries: [num_reqs, num_kv_heads, group, head_size].
        keys, values: [num_reqs, num_kv_heads, S, head size].
        layer: its constants.
        mask: True where a query may look; broadcasts to the scores.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = (query @ keys.transpose(-1, -2)).float() * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(1, query.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values
