"""What changes logits before a token is chosen: bias, bans, penalties.

Plain tensor functions over rows, without host synchronisation, so that any runner can
call them. The order is that of vLLM: bans and bias, then penalties; temperature, min-p,
top-k and top-p follow in `sampler`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Single logits to change, over all rows together.

    Attributes:
        rows, token_ids: [num_entries], int64; which logits.
        values: [num_entries], float32; added to them. -inf bans a token.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor

    def to(self, device: torch.device) -> TokenBias:
        """The same entries on a device."""
        columns = (self.rows, self.token_ids, self.values)
        return TokenBias(*(column.to(device) for column in columns))


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of some rows.

    Attributes:
        repetition: [num_rows], float32; 1 is none. Divides a positive logit, multiplies a
            negative one, of every token that is in prompt or output (Keskar et al., 2019).
        presence: [num_rows], float32; taken off once for each token in the output.
        frequency: [num_rows], float32; taken off for each time a token is in the output.
        in_prompt: [num_rows, vocab_size], bool.
        output_counts: [num_rows, vocab_size], float32.
    """

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    in_prompt: torch.Tensor
    output_counts: torch.Tensor


def add_bias(logits: torch.Tensor, bias: TokenBias) -> torch.Tensor:
    """Add to single logits; several entries for one logit add up.

    Args:
        logits: [num_rows, vocab_size], float32; changed in place.
    """
    return logits.index_put_((bias.rows, bias.token_ids), bias.values, accumulate=True)


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Make repeated tokens less likely (or, with negative penalties, more).

    Args:
        logits: [num_rows, vocab_size], float32.
        penalties: of the same rows.

    Returns:
        [num_rows, vocab_size].
    """
    in_output = penalties.output_counts > 0
    factor = penalties.repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(penalties.in_prompt | in_output, repeated, logits)
    logits = logits - penalties.frequency.unsqueeze(1) * penalties.output_counts
    return logits - penalties.presence.unsqueeze(1) * in_output


def count_tokens(token_ids: torch.Tensor, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """How often each token occurs in each row.

    Args:
        token_ids, rows: [num_tokens], int64; the tokens of all rows, and whose they are.
        shape: (num_rows, vocab_size).

    Returns:
        [num_rows, vocab_size], float32.
    """
    counts = torch.zeros(shape, dtype=torch.float32, device=token_ids.device)
    ones = torch.ones_like(token_ids, dtype=torch.float32)
    return counts.index_put_((rows, token_ids), ones, accumulate=True)
