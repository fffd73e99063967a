"""`cpu_paged`: decode attention of our own on a CPU, prefill through `sdpa`.

A decoding request has one query: all there is to do is to read its keys and values once,
where they lie. `sdpa` would gather them first. A prefill is matrix products, for which
PyTorch's kernels are the better ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runnerctl.runner.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    LayerKVCache,
)
from runnerctl.runner.attention.sdpa import SdpaBackend, SdpaMetadata

from .build import load_extension


@dataclass(frozen=True, slots=True)
class CpuPagedMetadata:
    """One step's requests, those that decode apart from the others.

    Attributes:
        rows: [num_decodes], int64; the query token of each.
        seq_lens: [num_decodes], int32.
        block_table: [num_decodes, max_blocks], int32, contiguous.
        others: the requests with several query tokens, or None.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    others: SdpaMetadata | None


class CpuPagedBackend(AttentionBackend[CpuPagedMetadata]):
    """See the module's docstring."""

    name = "cpu_paged"

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._sdpa = SdpaBackend(block_size)

    @classmethod
    def why_not(
        cls, layer: AttentionLayer, device: torch.device, dtype: torch.dtype, block_size: int
    ) -> str | None:
        """Serves layers without sinks in float32 and bfloat16 where its kernel can be built."""
        if device.type != "cpu":
            return f"it computes on a CPU, not on {device.type}"
        if layer.sinks is not None:
            return "its kernel has no attention sinks"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"it has no kernel for {str(dtype).removeprefix('torch.')}"
        extension = load_extension()
        return extension if isinstance(extension, str) else None

    def prepare(self, batch: AttentionBatch) -> CpuPagedMetadata:
        """Part the requests by their number of query tokens."""
        bounds = batch.query_start_loc_np
        is_decode = bounds[1:] - bounds[:-1] == 1
        if is_decode.all():
            rows = batch.query_start_loc[:-1].long()
            return CpuPagedMetadata(rows, batch.seq_lens, batch.block_table.contiguous(), None)
        places = torch.from_numpy(np.flatnonzero(is_decode))
        return CpuPagedMetadata(
            rows=batch.query_start_loc.index_select(0, places).long(),
            seq_lens=batch.seq_lens.index_select(0, places),
            block_table=batch.block_table.index_select(0, places),
            others=self._sdpa.prepare(batch, np.flatnonzero(~is_decode).tolist()),
        )

    def write(
        self,
        cache: LayerKVCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionBackend.write`; keys come transposed, which `index_copy_` is slow for."""
        torch.ops.runnerctl_cpu.write_slots(key, cache.key, slot_mapping)
        torch.ops.runnerctl_cpu.write_slots(value, cache.value, slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerKVCache,
        layer: AttentionLayer,
        metadata: CpuPagedMetadata,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        output = query.new_empty(query.shape[0], layer.num_heads, layer.head_size_v)
        if metadata.others is not None:
            self._sdpa.write_output(output, (query, key, value), cache, layer, metadata.others)
        if metadata.rows.shape[0]:
            torch.ops.runnerctl_cpu.paged_decode(
                output,
                query.contiguous(),
                cache.key,
                cache.value,
                metadata.rows,
                metadata.seq_lens,
                metadata.block_table,
                layer.scale,
                layer.sliding_window or 0,
                layer.softcap or 0.0,
            )
        return output
