"""What one rank runs of a step, and what it exchanges with the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runnerctl.runner.attention.base import AttentionBatch
from runnerctl.runner.protocol import WorkerContext
from runnerctl.runner.rank_groups import RankGroup
from runnerctl.runner.transfer import to_device

from .split import Piece, pieces_of_rank, sources, token_rows


class PrefillSplit:
    """Splits the prefills of each step over the ranks of a group. See `BatchTransform`."""

    def __init__(self, context: WorkerContext) -> None:
        assert context.groups is not None  # more ranks than one have met
        self._group = context.groups.pcp

    def split(self, batch: AttentionBatch) -> PrefillShare | None:
        """See `BatchTransform.split`. Steps that only decode are run whole by every rank."""
        if batch.max_query_len == 1:
            return None
        group, device = self._group, batch.block_table.device
        bounds, seq_lens = batch.query_start_loc_np, batch.seq_lens_np
        pieces = [pieces_of_rank(bounds, seq_lens, rank, group.size) for rank in range(group.size)]
        rows = [token_rows(of_rank) for of_rank in pieces]
        num_local = max(len(of_rank) for of_rank in rows)
        mine = pieces[group.rank]
        # To be as many as the others, and never none: the first token of all, alone.
        mine += [Piece(0, 0, 1, 1)] * (num_local - len(rows[group.rank]))
        source = sources(rows, int(bounds[-1]), num_local)
        return PrefillShare(
            group=group,
            token_rows=to_device(token_rows(mine).tolist(), torch.int64, device),
            attention=_attention_of(batch, mine),
            source=to_device(source.tolist(), torch.int64, device),
        )


@dataclass(frozen=True, slots=True)
class PrefillShare:
    """This rank's tokens of a step. See `BatchShare`.

    Attributes:
        group: of the ranks.
        token_rows, attention: see `BatchShare`.
        source: [num_tokens], int64; see `sources`.
    """

    group: RankGroup
    token_rows: torch.Tensor
    attention: AttentionBatch
    source: torch.Tensor

    def exchange_kv(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BatchShare.exchange_kv`; keys and values go together."""
        together = torch.cat((key.flatten(1), value.flatten(1)), dim=1)
        gathered = self.group.all_gather(together).flatten(0, 1).index_select(0, self.source)
        keys, values = gathered.split((key[0].numel(), value[0].numel()), dim=1)
        return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])

    def restore(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See `BatchShare.restore`; only the rows that are asked for travel."""
        if not rows.shape[0]:
            return hidden_states[:0]
        num_local = self.token_rows.shape[0]
        source = self.source.index_select(0, rows)
        owner, place = source // num_local, source % num_local
        # What is not ours is gathered too, and nobody looks at it.
        gathered = self.group.all_gather(hidden_states.index_select(0, place))
        return gathered[owner, torch.arange(rows.shape[0], device=rows.device)]


def _attention_of(batch: AttentionBatch, pieces: list[Piece]) -> AttentionBatch:
    """Each piece as a request of its own that ends where the piece does."""
    device = batch.block_table.device
    lengths = np.array([piece.end - piece.start for piece in pieces], np.int32)
    query_start_loc = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(lengths, out=query_start_loc[1:])
    requests = to_device([piece.request for piece in pieces], torch.int64, device)
    return AttentionBatch.from_host(
        query_start_loc=query_start_loc,
        seq_lens=np.array([piece.seq_len for piece in pieces], np.int32),
        block_table=batch.block_table.index_select(0, requests),
        slot_mapping=batch.slot_mapping[:0],
    )
