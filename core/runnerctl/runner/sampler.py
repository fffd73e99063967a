"""Choosing one token per row of logits: greedy, temperature, min-p, top-k, top-p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from runnerctl.runner.noise import gumbel_noise
from runnerctl.runner.transfer import to_device


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


@dataclass(frozen=True, slots=True)
class SamplingTraits:
    """What the host knows of a batch's parameters, so that sampling never has to ask the device.

    Attributes:
        random_rows: [num_random_rows], int64, on the device; those that are not greedy.
        max_top_k: the largest top-k of those rows; 0 if a row keeps all.
        any_top_k, any_top_p: whether any of those rows has a limit.
    """

    random_rows: torch.Tensor
    max_top_k: int
    any_top_k: bool
    any_top_p: bool

    @classmethod
    def of(cls, params: Sequence[tuple[float, int, float]], device: torch.device) -> SamplingTraits:
        """The traits of rows of (temperature, top_k, top_p), from values on the host."""
        random = [i for i, (temperature, _, _) in enumerate(params) if temperature > 0]
        top_ks = [params[i][1] for i in random]
        return cls(
            random_rows=to_device(random, torch.int64, device),
            max_top_k=0 if 0 in top_ks else max(top_ks, default=0),
            any_top_k=any(top_ks),
            any_top_p=any(params[i][2] < 1 for i in random),
        )


def sample(logits: torch.Tensor, batch: SamplingBatch, traits: SamplingTraits) -> torch.Tensor:
    """One token per row. Nothing here waits for the device.

    Args:
        logits: [num_rows, vocab_size], any float type.
        batch: its parameters, on the same device.
        traits: of `batch`.

    Returns:
        [num_rows], int64.
    """
    token_ids = logits.argmax(dim=-1)
    rows = traits.random_rows
    if rows.shape[0]:
        drawn = _draw(logits[rows].float(), batch.rows(rows), traits)
        token_ids = token_ids.index_copy(0, rows, drawn)
    return token_ids


def _draw(logits: torch.Tensor, batch: SamplingBatch, traits: SamplingTraits) -> torch.Tensor:
    """Sample every row by the Gumbel-max trick over the candidates it keeps."""
    # With the best at 0, no temperature is so low that logits overflow and tie at infinity.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / batch.temperature.unsqueeze(1)
    # p < min_p * max(p), without the exponentials; log 0 = -inf drops nothing
    logits = logits.masked_fill(logits < batch.min_p.log().unsqueeze(1), float("-inf"))
    if not traits.any_top_k and not traits.any_top_p:
        token_ids = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
        noise = gumbel_noise(batch.seeds, batch.positions, token_ids)
        return (logits + noise).argmax(dim=-1)
    logits, token_ids = _sorted_candidates(logits, batch, traits.max_top_k)
    noise = gumbel_noise(batch.seeds, batch.positions, token_ids)
    best = (logits + noise).argmax(dim=-1, keepdim=True)
    return token_ids.gather(1, best).squeeze(1)


def _sorted_candidates(
    logits: torch.Tensor, batch: SamplingBatch, max_top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in falling order, -inf where top-k or top-p drop them, and their token ids.

    Top-p looks at the probabilities that top-k leaves, as in transformers and vLLM.
    """
    vocab_size = logits.shape[1]
    top_k = torch.where(batch.top_k > 0, batch.top_k, vocab_size).clamp(max=vocab_size)
    # a full sort costs much more than picking the few that all rows can use
    logits, token_ids = logits.topk(min(max_top_k or vocab_size, vocab_size), dim=-1)
    rank = torch.arange(logits.shape[1], device=logits.device)
    logits = logits.masked_fill(rank >= top_k.unsqueeze(1), float("-inf"))
    probabilities = logits.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # Rounding may bring the sum to 1 before the last: 1 has to mean no limit, as in a
    # batch where nobody has one.
    top_p = batch.top_p.masked_fill(batch.top_p >= 1, float("inf"))
    return logits.masked_fill(before >= top_p.unsqueeze(1), float("-inf")), token_ids
