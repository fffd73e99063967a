"""Log-probabilities of chosen and likely tokens, as the model gave them.

They are taken from the raw logits, before bias, penalties and temperature, as vLLM
does by default: what the model thinks, not what the sampling made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from runnerctl.runner.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities on the device.

    Attributes:
        token_ids, logprobs, ranks: [num_rows]; the tokens that came.
        top_ids, top_logprobs: [num_rows, most asked for]; best first.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LogprobTensors:
        """The same with every tensor changed: copied to the host, say."""
        return LogprobTensors(*(change(getattr(self, column)) for column in self.__slots__))

    def to_entries(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """One `TokenLogprobs` per row; waits for the device.

        Args:
            counts: per row, how many of the most likely tokens it gets.
        """
        columns = (getattr(self, column).tolist() for column in self.__slots__)
        return [
            TokenLogprobs(token, value, rank, tuple(ids[:count]), tuple(values[:count]))
            for token, value, rank, ids, values, count in zip(*columns, counts, strict=True)
        ]


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> LogprobTensors:
    """The log-probability of one token per row, and of the row's most likely ones.

    Does not wait for the device.

    Args:
        logits: [num_rows, vocab_size].
        token_ids: [num_rows], int64; the tokens that came next.
        most: how many of the most likely tokens any row wants.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    # 1 is the most likely; tokens of equal probability share the better rank
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top, top_ids = logprobs.topk(min(most, logits.shape[1]), dim=-1)
    return LogprobTensors(token_ids, chosen.squeeze(1), ranks, top_ids, top)


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]
) -> list[TokenLogprobs]:
    """As `compute_logprobs`, on the host: one `TokenLogprobs` per row.

    Args:
        counts: per row, how many of the most likely tokens to add.
    """
    return compute_logprobs(logits, token_ids, max(counts)).to_entries(counts)
