"""Answers as JSON: what `generate --format json` prints, and each line of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from runnerctl.engine.outputs import CompletionOutput, Logprobs, RequestOutput


def answers(output: RequestOutput) -> dict[str, Any]:
    """The answers to one prompt; a single one flat, several as the list `outputs`."""
    several = len(output.outputs) > 1
    record: dict[str, Any] = (
        {"outputs": [_answer(one) for one in output.outputs]}
        if several
        else _answer(output.outputs[0])
    )
    record["num_cached_tokens"] = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    return record


def _answer(output: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
    }
    if output.logprobs is not None:
        record["logprobs"] = _logprobs(output.logprobs)
    return record


def _logprobs(entries: Sequence[Logprobs | None]) -> list[list[dict[str, Any]] | None]:
    """One list per token: the token that came, then the likeliest ones in its place."""
    return [
        None
        if entry is None
        else [
            {
                "token_id": token_id,
                # JSON has no infinity, which is what an impossible token has
                "logprob": one.logprob if math.isfinite(one.logprob) else None,
                "rank": one.rank,
                "token": one.decoded_token,
            }
            for token_id, one in entry.items()
        ]
        for entry in entries
    ]
