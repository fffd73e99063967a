"""Log-probabilities of chosen and likely tokens, as the model gave them.

They are taken from the raw logits, before bias, penalties and temperature, as vLLM
does by default: what the model thinks, not what the sampling made of it.
"""

from __future__ import annotations

import torch

from runnerctl.runner.step import TokenLogprobs


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int]
) -> list[TokenLogprobs]:
    """The log-probability of one token per row, and of the row's most likely ones.

    Args:
        logits: [num_rows, vocab_size].
        token_ids: [num_rows], int64; the tokens that came next.
        counts: per row, how many of the most likely tokens to add.

    Returns:
        One `TokenLogprobs` per row, on the host.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    # 1 is the most likely; tokens of equal probability share the better rank
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top, top_ids = logprobs.topk(min(max(counts), logits.shape[1]), dim=-1)
    columns = zip(
        token_ids.tolist(),
        chosen.squeeze(1).tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        top.tolist(),
        counts,
        strict=True,
    )
    return [
        TokenLogprobs(token, value, rank, tuple(ids[:count]), tuple(values[:count]))
        for token, value, rank, ids, values, count in columns
    ]
