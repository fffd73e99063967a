"""V2's state table: one row per live request, on the device, for as long as it lives.

A row never moves. Each step gathers the rows it works on by `idx_mapping`, and what a
step samples is written back to its row, so the next step needs nothing from the host
but which rows, how many tokens of each, and the blocks that were added. The design
follows vLLM's second model runner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.runner.step import NewRequest, StepPlan
from runnerctl.runner.transfer import to_device


@dataclass(slots=True)
class HostRow:
    """What the host knows of a row without asking the device.

    Attributes:
        index: the row in the table.
        sampling_params, stop_token_ids, num_prompt_tokens: as the request came.
        num_tokens: tokens there will be once all submitted steps are done; the last ones
            may be known to the device only.
        num_computed_tokens: after all submitted steps.
        num_blocks: blocks in its block table.
    """

    index: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int

    def gets_token(self, num_scheduled: int) -> bool:
        """Whether a step of so many tokens computes the last known one, and samples."""
        return self.num_computed_tokens + num_scheduled == self.num_tokens

    def advance(self, num_scheduled: int) -> None:
        """Count a step of so many tokens, and the token that it samples."""
        self.num_tokens += self.gets_token(num_scheduled)
        self.num_computed_tokens += num_scheduled


class StateTable:
    """Rows 0 to `max_num_seqs - 1` are requests; the last one is a stand-in that pads batches.

    Attributes:
        token_ids: [num_rows, max_model_len], int32; prompt, then what was sampled.
        num_computed_tokens: [num_rows], int32; tokens whose KV is in the cache.
        block_table: [num_rows, max blocks per request], int32. The padding row's entries
            are the scratch block, which belongs to nobody.
        temperature, top_p, min_p: [num_rows], float32.
        top_k, seed: [num_rows], int64.
        arange: [num_rows], int64; 0, 1, 2 ... to take slices of, like the next two.
        ones: [num_rows], int32; tokens of each request in a step of one token each.
        decode_starts: [num_rows + 1], int32; where their tokens start.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
    ) -> None:
        num_rows = max_num_seqs + 1
        max_blocks = -(-max_model_len // block_size)

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=device)

        self.block_size = block_size
        self.max_model_len = max_model_len
        self.device = device
        self.padding_row = max_num_seqs
        self.token_ids = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self.num_computed_tokens = column(torch.int32)
        self.block_table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.block_table[self.padding_row] = scratch_block
        self.temperature = column(torch.float32)
        self.top_p = column(torch.float32)
        self.min_p = column(torch.float32)
        self.top_k = column(torch.int64)
        self.seed = column(torch.int64)
        self.arange = torch.arange(num_rows, device=device)
        self.ones = column(torch.int32).fill_(1)
        self.decode_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._rows: dict[str, HostRow] = {}
        self._free = list(reversed(range(max_num_seqs)))

    def tokens_at(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n], int32: one token of each row; both arguments are [n], int64."""
        # One flat lookup costs a third of what indexing in two dimensions does on a CPU.
        return self.token_ids.view(-1).index_select(0, self._flat(rows, positions))

    def write_tokens(
        self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Put one token into each row; the arguments are [n], int64, no row twice.

        Positions are below `max_model_len`, which `StepBatch.of` sees to on the host: one
        beyond would be the next row's.
        """
        self.token_ids.view(-1).index_copy_(0, self._flat(rows, positions), tokens.int())

    def slots(self, block_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the K and V of tokens go: block id x block size + offset.

        Args:
            block_table: [n, max blocks], int32; of each token's request.
            positions: [n], int64.

        Returns:
            [n], int64.
        """
        place = positions // self.block_size
        block_ids = block_table.gather(1, place.unsqueeze(1)).squeeze(1)
        return torch.add(positions, block_ids - place, alpha=self.block_size)

    def row(self, request_id: str) -> HostRow:
        """The host's side of a live request's row."""
        return self._rows[request_id]

    def update(self, plan: StepPlan) -> None:
        """Bring the table in line with a plan: rows that go, that come, blocks that are added."""
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            self._drop(request_id)
        for new in plan.new_requests:
            self._drop(new.request_id)  # a finished request's id, used again
            self._admit(new)
        rows: list[int] = []
        columns: list[int] = []
        block_ids: list[int] = []
        for cached in plan.cached_requests:
            row = self._rows[cached.request_id]
            added = len(cached.new_block_ids)
            rows += [row.index] * added
            columns += range(row.num_blocks, row.num_blocks + added)
            block_ids += cached.new_block_ids
            row.num_blocks += added
        if rows:
            where = to_device([*rows, *columns], torch.int64, self.device).view(2, -1)
            values = to_device(block_ids, torch.int32, self.device)
            self.block_table.index_put_((where[0], where[1]), values)

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in list(self._rows):
            self._drop(request_id)

    def _flat(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.add(positions, rows, alpha=self.token_ids.shape[1])

    def _drop(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row.index)

    def _admit(self, new: NewRequest) -> None:
        index = self._free.pop()
        params = new.sampling_params
        assert params.seed is not None  # set at admission
        num_tokens, num_blocks = len(new.prefill_token_ids), len(new.block_ids)
        self._rows[new.request_id] = HostRow(
            index=index,
            sampling_params=params,
            stop_token_ids=new.stop_token_ids,
            num_prompt_tokens=new.num_prompt_tokens,
            num_tokens=num_tokens,
            num_computed_tokens=new.num_computed_tokens,
            num_blocks=num_blocks,
        )
        integers = to_device(
            [*new.prefill_token_ids, *new.block_ids, new.num_computed_tokens],
            torch.int32,
            self.device,
        )
        self.token_ids[index, :num_tokens] = integers[:num_tokens]
        self.block_table[index, :num_blocks] = integers[num_tokens:-1]
        self.num_computed_tokens[index] = integers[-1]
        self.temperature[index] = params.temperature
        self.top_p[index] = params.top_p
        self.min_p[index] = params.min_p
        self.top_k[index] = params.top_k
        self.seed[index] = params.seed
