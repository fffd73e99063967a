"""Attention written out in float64, one query at a time, on contiguous keys and values."""

from __future__ import annotations

import math

import torch


def reference_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence.

    Args:
        query: [Q, H, D]; the last Q of the S tokens.
        keys, values: [S, Hkv, D], [S, Hkv, Dv].
        scale, sliding_window, softcap, sinks: as in `AttentionLayer`.

    Returns:
        [Q, H, Dv], float64, on the CPU.
    """
    query, keys, values = (t.cpu().double() for t in (query, keys, values))
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, head_size_v = values.shape
    output = torch.empty(num_queries, num_heads, head_size_v, dtype=torch.float64)
    for q in range(num_queries):
        position = num_keys - num_queries + q
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scores = keys[first : position + 1, kv_head] @ query[q, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.max())
            total = math.fsum(weights.tolist())
            if sinks is not None:
                total += math.exp(float(sinks[head]) - float(scores.max()))
            weights = weights / total
            output[q, head] = weights @ values[first : position + 1, kv_head]
    return output
