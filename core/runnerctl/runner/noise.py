"""Gumbel noise that depends on nothing but seed, position and token id.

So a request samples the same text alone, in any batch, after a preemption and on
any runner: its noise is a function, not a stream that others draw from too.
argmax(logits / temperature + noise) is a sample from the softmax (the Gumbel-max
trick; Maddison, Tarlow and Minka, 2014). The hash is the finaliser of MurmurHash3,
applied twice with two keys.
"""

from __future__ import annotations

import torch

_LOW_32 = 0xFFFFFFFF


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel noise for each candidate token.

    Args:
        seeds: [num_rows], int64.
        positions: [num_rows], int64; the index in its sequence that the sampled token
            will have.
        token_ids: [num_rows, num_candidates] or [1, num_candidates], integers.

    Returns:
        [num_rows, num_candidates], float32, finite.
    """
    low = _to_int32(seeds)
    high = _to_int32(seeds >> 32)
    position = _to_int32(positions)
    # one key per row from all 96 bits, in two halves
    key_a = _mix(_mix(low ^ 0x5BD1E995) + position)
    key_b = _mix(_mix(high ^ 0x1B873593) ^ key_a)
    bits = _mix(token_ids.to(torch.int32) * -0x61C88647 + key_a.unsqueeze(1))
    bits = _mix(bits ^ key_b.unsqueeze(1))
    # the upper 24 bits fit a float32 exactly; one half keeps both logarithms finite
    uniform = (((bits >> 8) & 0xFFFFFF).to(torch.float32) + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def _to_int32(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits, as a signed number."""
    low = values & _LOW_32
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser. Shifts are made logical by masking the sign's copies."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * -0x7A143595  # 0x85EBCA6B
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits * -0x3D4D51CB  # 0xC2B2AE35
    return bits ^ ((bits >> 16) & 0xFFFF)
