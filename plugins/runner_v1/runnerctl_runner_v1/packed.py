"""All requests of a step in one packed row, over the paged cache."""

from __future__ import annotations

import torch

from runnerctl.runner.attention.base import AttentionBatch
from runnerctl.runner.paged_loading import LoadedPagedModel
from runnerctl.runner.protocol import KVCacheSpec

from .serving import ModelStep


class PackedServing:
    """See the module's docstring, and `Serving`."""

    carries_chunks = True

    def __init__(self, loaded: LoadedPagedModel, block_size: int) -> None:
        self.facts = loaded.facts
        self._loaded = loaded
        self._block_size = block_size

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Serving.kv_cache_spec`."""
        return self._loaded.kv_cache_spec()

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        """See `Serving.allocate`."""
        self._loaded.model.allocate_cache(self._loaded.backend, num_blocks, self._block_size)

    def forward(self, step: ModelStep) -> torch.Tensor:
        """See `Serving.forward`."""
        model, backend = self._loaded.model, self._loaded.backend
        batch = attention_batch(step, model.device)
        return model.forward(
            torch.from_numpy(step.token_ids).to(model.device),
            torch.from_numpy(step.positions).to(model.device),
            torch.from_numpy(step.logits_rows).to(model.device),
            backend.prepare(batch),
            batch.slot_mapping,
        )

    def forget(self, request_id: str) -> None:
        """The blocks of a request are the scheduler's business."""

    def close(self) -> None:
        """See `Serving.close`."""
        self._loaded.model.close()


def attention_batch(step: ModelStep, device: torch.device) -> AttentionBatch:
    """The step as an attention backend sees it."""
    return AttentionBatch.from_host(
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        block_table=torch.from_numpy(step.block_table).to(device),
        slot_mapping=torch.from_numpy(step.slot_mapping).to(device),
    )
