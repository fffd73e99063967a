"""What V1 asks of a model, whatever keeps its past: the step it is given, and the ways there are.

`packed` for attention on the paged cache, `recurrent` for layers with state of their own, and
`own_cache` for everything that fits neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from runnerctl.runner.protocol import KVCacheSpec, LoadedModel


@dataclass(frozen=True, slots=True)
class ModelStep:
    """The tokens to run in one step, on the host, packed request after request.

    Attributes:
        request_ids: whose; each has at least one token here.
        num_prompt_tokens: of each request; what comes behind was generated.
        token_ids, positions: [num_tokens], int64.
        query_start_loc: [num_reqs + 1], int32; where each request's tokens start.
        seq_lens: [num_reqs], int32; tokens of a request including these.
        block_table: [num_reqs, max_blocks], int32.
        slot_mapping: [num_tokens], int64.
        logits_rows: [num_logits], int64, increasing within a request; tokens whose logits
            are wanted.
    """

    request_ids: list[str]
    num_prompt_tokens: list[int]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    logits_rows: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Over all requests."""
        return len(self.token_ids)


class Serving(Protocol):
    """A loaded model that can be run step by step.

    Attributes:
        facts: for the engine.
        carries_chunks: a prompt may be run in pieces. If not, V1 runs it whole with its last
            piece.
    """

    facts: LoadedModel
    carries_chunks: bool

    def kv_cache_spec(self) -> KVCacheSpec:
        """The cache the model needs, and the memory there is for it."""
        ...

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        """Allocate the cache; at most so many requests have a past at once."""
        ...

    def forward(self, step: ModelStep) -> torch.Tensor:
        """Run a step: [num_logits, vocab_size], in the order of `step.logits_rows`."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop the past of a request; one that is not known is nothing to it."""
        ...

    def close(self) -> None:
        """Let go of model and caches."""
        ...
