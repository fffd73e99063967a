"""From what a caller gives to requests that can be queued; everything is checked first."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.engine.tokenizer import Tokenizer
from runnerctl.errors import UserError


def per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """One SamplingParams for each prompt.

    Raises:
        UserError: their number is another than that of the prompts, or one is something else.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        raise UserError(
            f"{count} prompts came with {len(sampling_params)} SamplingParams",
            remedy="give one for all, or one per prompt",
            setting="sampling_params",
        )
    for index, params in enumerate(sampling_params):
        if not isinstance(params, SamplingParams):
            raise UserError(
                f"sampling_params has {type(params).__name__} for prompt {index}",
                remedy="give SamplingParams(temperature=..., ...)",
                setting="sampling_params",
            )
    return sampling_params


def for_this_model(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> SamplingParams:
    """The parameters with what only the model knows: bad words as token ids, a seed.

    Raises:
        UserError: strings without a tokenizer, or token ids the model does not have.
    """
    if tokenizer is None:
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise UserError(
                    f"{name} is text, which needs a tokenizer, and this model has none",
                    remedy=f"use {'stop_token_ids' if name == 'stop' else 'bad_words_token_ids'}",
                    setting=name,
                )
    words = set(params.bad_words_token_ids)
    for word in params.bad_words:
        assert tokenizer is not None
        # at the start of a text, and in the middle of one
        words |= {tuple(tokenizer.encode(w, special=False)) for w in (word, f" {word}")}
    named = {
        "logit_bias": [token for token, _ in _pairs(params)],
        "bad_words_token_ids": [token for word in words for token in word],
        "stop_token_ids": params.stop_token_ids,
    }
    for name, token_ids in named.items():
        unknown = [token for token in token_ids if not 0 <= token < vocab_size]
        if unknown:
            raise UserError(
                f"{name} has the token id {unknown[0]}, but this model knows 0 to {vocab_size - 1}",
                remedy="was it meant for another model?",
                setting=name,
            )
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return replace(params, seed=seed, bad_words_token_ids=tuple(sorted(words)))


def for_answer(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of `n` answers: its own seed; the prompt is looked at once."""
    assert params.seed is not None
    seed = (params.seed + index + 2**63) % 2**64 - 2**63
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)


def _pairs(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    assert isinstance(params.logit_bias, tuple)
    return params.logit_bias
