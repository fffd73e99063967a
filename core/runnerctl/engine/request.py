"""`Request`: one sequence on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from runnerctl.engine.block_pool import ROOT_HASH, BlockHash, hash_block
from runnerctl.engine.outputs import FinishReason
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.runner.step import TokenLogprobs


class RequestStatus(Enum):
    """Where a request stands. `PREEMPTED` ones wait again, without blocks."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Request:
    """The engine's view of a sequence: tokens, blocks, progress.

    Attributes:
        token_ids: prompt and generated tokens.
        block_ids: KV blocks in order of position; empty unless running.
        num_output_placeholders: tokens that steps in flight will sample for it. They count
            as known: the runner has them before the engine does.
        num_computed_tokens: tokens whose KV is, or after the planned steps will be,
            in the blocks.
        last_step_id: the last step that it was part of; -1 before the first.
        num_indexed_blocks: leading blocks that the prefix cache knows.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission;
            None before that.
        num_preemptions: how often it lost its blocks.
        logprobs: of the generated tokens, if they are wanted.
        prompt_logprobs: of the prompt tokens from the second on, as far as they are known.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        max_total_tokens: int,
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = min(
            max_total_tokens, self.num_prompt_tokens + sampling_params.max_tokens
        )
        eos = frozenset() if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_ids = eos | frozenset(sampling_params.stop_token_ids)
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.block_ids: list[int] = []
        self.num_output_placeholders = 0
        self.num_computed_tokens = 0
        self.last_step_id = -1
        self.num_indexed_blocks = 0
        self.num_cached_tokens: int | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_preemptions = 0
        self._block_hashes: list[BlockHash] = []

    @property
    def may_use_cached_prefix(self) -> bool:
        """False if every prompt token has to be computed, for its log-probability."""
        return self.sampling_params.prompt_logprobs is None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is still to be computed; 1 for a decoding request."""
        return len(self.token_ids) + self.num_output_placeholders - self.num_computed_tokens

    @property
    def awaits_last_token(self) -> bool:
        """True if a step in flight brings the last token allowed: no other step is needed."""
        placeholders = self.num_output_placeholders
        return placeholders > 0 and len(self.token_ids) + placeholders >= self.max_total_tokens

    def append(self, token_id: int) -> None:
        """Add a sampled token and, if it is the last one, set `finish_reason`.

        Before `min_tokens` the runner bans the end tokens, so that none comes here.
        """
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.num_tokens >= self.max_total_tokens:
            self.finish_reason = "length"

    def add_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Take those of the prompt tokens from position `start` on.

        A request that was preempted computes its prompt again; what is known stays.
        """
        self.prompt_logprobs += entries[len(self.prompt_logprobs) + 1 - start :]

    def block_hashes(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Keys of the first `num_blocks` blocks, which must be full of known tokens."""
        known = self._block_hashes
        while len(known) < num_blocks:
            start = len(known) * block_size
            parent = known[-1] if known else ROOT_HASH
            known.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return known[:num_blocks] if len(known) > num_blocks else known
