"""V1's persistent batch: request state in host arrays, in batch order.

Rows 0 to `num_rows - 1` are the requests of the current step. A request that
leaves is replaced by the last row, so the rows in use stay together; everything
a step needs is then a slice or one vectorised lookup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runnerctl.engine.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class RequestState:
    """What V1 keeps of a request for as long as it lives, in the batch or out of it.

    Attributes:
        num_prompt_tokens: how many of `token_ids` are the prompt.
        stop_token_ids: banned before `min_tokens`.
        token_ids: every token known so far.
        block_ids: its KV blocks; stale while it is preempted.
        num_computed_tokens: as of the last plan that scheduled it.
        num_run_tokens: how many the model has run. Fewer than were computed, as the scheduler
            has it, where pieces of a prompt are kept for its last one.
    """

    request_id: str
    sampling_params: SamplingParams
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    num_run_tokens: int


class InputBatch:
    """Row-wise arrays over the requests of a step.

    Attributes:
        request_ids: of the rows in use.
        token_ids: [max_num_seqs, max_model_len], int32.
        num_tokens, num_computed_tokens: [max_num_seqs], int32.
        block_table: [max_num_seqs, max blocks per request], int32.
        temperature, top_k, top_p, min_p, seed: [max_num_seqs].
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.request_ids: list[str] = []
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self._row_of: dict[str, int] = {}
        self._num_blocks = np.zeros(max_num_seqs, np.int32)

    @property
    def num_rows(self) -> int:
        """Requests in the batch."""
        return len(self.request_ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def row(self, request_id: str) -> int:
        """Where a request is now."""
        return self._row_of[request_id]

    def add(self, state: RequestState) -> None:
        """Put a request into the next free row."""
        row = self.num_rows
        self.request_ids.append(state.request_id)
        self._row_of[state.request_id] = row
        self.token_ids[row, : len(state.token_ids)] = state.token_ids
        self.num_tokens[row] = len(state.token_ids)
        self.num_computed_tokens[row] = state.num_computed_tokens
        self._num_blocks[row] = 0
        self.append_blocks(state.request_id, state.block_ids)
        params = state.sampling_params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed

    def append_blocks(self, request_id: str, block_ids: Any) -> None:
        """Add blocks behind those a request has."""
        row = self._row_of[request_id]
        start = int(self._num_blocks[row])
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] += len(block_ids)

    def append_token(self, request_id: str, token_id: int) -> None:
        """Add a sampled token behind those a request has."""
        row = self._row_of[request_id]
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1

    def remove(self, request_id: str) -> None:
        """Take a request out; the last row moves into its place."""
        row, last = self._row_of.pop(request_id), self.num_rows - 1
        moved = self.request_ids.pop()
        if row == last:
            return
        self.request_ids[row] = moved
        self._row_of[moved] = row
        num_tokens = self.num_tokens[last]
        self.token_ids[row, :num_tokens] = self.token_ids[last, :num_tokens]
        num_blocks = self._num_blocks[last]
        self.block_table[row, :num_blocks] = self.block_table[last, :num_blocks]
        for column in (
            self.num_tokens,
            self.num_computed_tokens,
            self._num_blocks,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
        ):
            column[row] = column[last]
