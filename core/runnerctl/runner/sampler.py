"""Choosing one token per row of logits: greedy, temperature, min-p, top-k, top-p."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runnerctl.runner.noise import gumbel_noise


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of the rows to sample.

    Attributes:
        temperature: [num_rows], float32; 0 is greedy.
        top_k: [num_rows], int64; 0 keeps all.
        top_p: [num_rows], float32; 1 keeps all.
        min_p: [num_rows], float32; 0 keeps all.
        seeds: [num_rows], int64.
        positions: [num_rows], int64; the index the sampled token will have.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def rows(self, index: torch.Tensor) -> SamplingBatch:
        """The parameters of some rows."""
        return self._map(lambda column: column[index])

    def to(self, device: torch.device) -> SamplingBatch:
        """The same parameters on a device."""
        return self._map(lambda column: column.to(device))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SamplingBatch:
        return SamplingBatch(*(change(getattr(self, column)) for column in self.__slots__))


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token per row.

    Args:
        logits: [num_rows, vocab_size], any float type.
        batch: its parameters, on the same device.

    Returns:
        [num_rows], int64.
    """
    token_ids = logits.argmax(dim=-1)
    random_rows = (batch.temperature > 0).nonzero().squeeze(1)
    if random_rows.numel():
        drawn = _draw(logits[random_rows].float(), batch.rows(random_rows))
        token_ids[random_rows] = drawn
    return token_ids


def _draw(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Sample every row by the Gumbel-max trick over the candidates it keeps."""
    # With the best at 0, no temperature is so low that logits overflow and tie at infinity.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / batch.temperature.unsqueeze(1)
    # p < min_p * max(p), without the exponentials; log 0 = -inf drops nothing
    logits = logits.masked_fill(logits < batch.min_p.log().unsqueeze(1), float("-inf"))
    if not (batch.top_k > 0).any() and not (batch.top_p < 1).any():
        token_ids = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
        noise = gumbel_noise(batch.seeds, batch.positions, token_ids)
        return (logits + noise).argmax(dim=-1)
    logits, token_ids = _sorted_candidates(logits, batch)
    noise = gumbel_noise(batch.seeds, batch.positions, token_ids)
    best = (logits + noise).argmax(dim=-1, keepdim=True)
    return token_ids.gather(1, best).squeeze(1)


def _sorted_candidates(
    logits: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in falling order, -inf where top-k or top-p drop them, and their token ids.

    Top-p looks at the probabilities that top-k leaves, as in transformers and vLLM.
    """
    vocab_size = logits.shape[1]
    top_k = torch.where(batch.top_k > 0, batch.top_k, vocab_size).clamp(max=vocab_size)
    # a full sort costs much more than picking the few that all rows can use
    logits, token_ids = logits.topk(int(top_k.max()), dim=-1)
    rank = torch.arange(logits.shape[1], device=logits.device)
    logits = logits.masked_fill(rank >= top_k.unsqueeze(1), float("-inf"))
    probabilities = logits.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # Rounding may bring the sum to 1 before the last: 1 has to mean no limit, as in a
    # batch where nobody has one.
    top_p = batch.top_p.masked_fill(batch.top_p >= 1, float("inf"))
    return logits.masked_fill(before >= top_p.unsqueeze(1), float("-inf")), token_ids
