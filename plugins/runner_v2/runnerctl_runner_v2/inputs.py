"""V2's step inputs: the host says which rows and how many tokens, the device does the rest.

Nothing here waits for the device or has a shape that depends on its data, so a CUDA
graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runnerctl.runner.attention.base import AttentionBatch
from runnerctl.runner.step import StepPlan
from runnerctl.runner.transfer import to_device

from .state_table import HostRow, StateTable


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The requests of one step, as the host sees them.

    Attributes:
        request_ids, rows: in the order of the batch.
        num_scheduled: tokens of each.
        num_computed: tokens of each that were computed before.
        sampling: places in the batch of those that get a token.
        num_tokens: of all together.
    """

    request_ids: list[str]
    rows: list[HostRow]
    num_scheduled: list[int]
    num_computed: list[int]
    sampling: list[int]
    num_tokens: int

    @classmethod
    def of(cls, plan: StepPlan, table: StateTable) -> StepBatch:
        """The batch of a plan that the table was updated with.

        Raises:
            RuntimeError: a request would outgrow its row, and write into the next one.
        """
        request_ids = list(plan.num_scheduled_tokens)
        rows = [table.row(request_id) for request_id in request_ids]
        num_scheduled = list(plan.num_scheduled_tokens.values())
        sampling = []
        for i, row in enumerate(rows):
            gets_token = row.gets_token(num_scheduled[i])
            end = row.num_computed_tokens + num_scheduled[i] + gets_token
            if end > table.max_model_len:
                raise RuntimeError(
                    f"step {plan.step_id} takes request {request_ids[i]} to {end} tokens; "
                    f"max_model_len is {table.max_model_len}"
                )
            if gets_token:
                sampling.append(i)
        num_computed = [row.num_computed_tokens for row in rows]
        return cls(request_ids, rows, num_scheduled, num_computed, sampling, sum(num_scheduled))

    @property
    def is_decode(self) -> bool:
        """True if every request has one token, and gets one."""
        return len(self.sampling) == len(self.rows) == self.num_tokens

    def advance(
        self, table: StateTable, idx_mapping: torch.Tensor, num_scheduled: torch.Tensor
    ) -> None:
        """Count the step as computed, here and on the device, and its samples as known.

        Args:
            table: that of the rows.
            idx_mapping, num_scheduled: see `StepInputs`.
        """
        table.num_computed_tokens.index_add_(0, idx_mapping, num_scheduled)
        for row, count in zip(self.rows, self.num_scheduled, strict=True):
            row.advance(count)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model is given.

    Attributes:
        idx_mapping: [num_reqs], int64; the rows.
        num_scheduled: [num_reqs], int32; tokens of each.
        input_ids, positions: [num_tokens], int64.
        attention: of the step.
    """

    idx_mapping: torch.Tensor
    num_scheduled: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch


def prepare(table: StateTable, batch: StepBatch) -> StepInputs:
    """Inputs of any mixture of prefills, chunks and decodes."""
    device = table.device
    num_reqs, num_tokens = len(batch.rows), batch.num_tokens
    scheduled_np = np.array(batch.num_scheduled, np.int32)
    seq_lens_np = np.array(batch.num_computed, np.int32) + scheduled_np
    query_start_loc_np = np.zeros(num_reqs + 1, np.int32)
    np.cumsum(scheduled_np, out=query_start_loc_np[1:])
    # One transfer for all that the host has to say.
    indices = [row.index for row in batch.rows]
    said = to_device([*indices, *query_start_loc_np.tolist()], torch.int64, device)
    idx_mapping, query_start_loc = said[:num_reqs], said[num_reqs:]
    num_scheduled = (query_start_loc[1:] - query_start_loc[:-1]).int()
    computed = table.num_computed_tokens.index_select(0, idx_mapping)
    places = table.arange[:num_reqs]
    req_of_token = places.repeat_interleave(num_scheduled, output_size=num_tokens)
    row_of_token = idx_mapping.index_select(0, req_of_token)
    first_position = (computed - query_start_loc[:-1]).index_select(0, req_of_token)
    positions = first_position + torch.arange(num_tokens, device=device)
    longest = int(seq_lens_np.max())
    block_table = _block_table(table, idx_mapping, longest)
    return StepInputs(
        idx_mapping=idx_mapping,
        num_scheduled=num_scheduled,
        input_ids=table.tokens_at(row_of_token, positions).long(),
        positions=positions,
        attention=AttentionBatch(
            query_start_loc=query_start_loc.int(),
            seq_lens=computed + num_scheduled,
            block_table=block_table,
            slot_mapping=table.slots(block_table.index_select(0, req_of_token), positions),
            max_query_len=int(scheduled_np.max()),
            max_seq_len=longest,
            query_start_loc_np=query_start_loc_np,
            seq_lens_np=seq_lens_np,
        ),
    )


def prepare_decode(
    table: StateTable, idx_mapping: torch.Tensor, seq_lens_np: np.ndarray
) -> StepInputs:
    """Inputs of a step in which every row has one token. Much of `prepare` falls away.

    Args:
        idx_mapping: [num_reqs], int64, on the device; may hold the padding row.
        seq_lens_np: [num_reqs], int32; the lengths with this token, for backends that loop on
            the host. Under a CUDA graph, which serves many steps, what they may come to.
    """
    num_reqs, longest = idx_mapping.shape[0], int(seq_lens_np.max())
    computed = table.num_computed_tokens.index_select(0, idx_mapping)
    positions = computed.long()
    block_table = _block_table(table, idx_mapping, longest)
    return StepInputs(
        idx_mapping=idx_mapping,
        num_scheduled=table.ones[:num_reqs],
        input_ids=table.tokens_at(idx_mapping, positions).long(),
        positions=positions,
        attention=AttentionBatch(
            query_start_loc=table.decode_starts[: num_reqs + 1],
            seq_lens=computed + 1,
            block_table=block_table,
            slot_mapping=table.slots(block_table, positions),
            max_query_len=1,
            max_seq_len=longest,
            query_start_loc_np=np.arange(num_reqs + 1, dtype=np.int32),
            seq_lens_np=seq_lens_np,
        ),
    )


def _block_table(table: StateTable, rows: torch.Tensor, max_seq_len: int) -> torch.Tensor:
    """[num_rows, blocks of the longest sequence], int32."""
    width = -(-max_seq_len // table.block_size)
    return table.block_table[:, :width].index_select(0, rows)
