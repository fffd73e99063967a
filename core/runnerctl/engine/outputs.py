"""What a caller gets back: a request's completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """What the model thought of one token.

    Attributes:
        logprob: its log-probability, before temperature, penalties and bias.
        rank: 1 for the most likely token.
        decoded_token: its text by itself; "" without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str


Logprobs = Mapping[int, Logprob]
"""By token id: the token that came, and the likeliest ones in its place."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: which of the request's answers this is.
        text: what was generated so far, without stop strings; "" without a tokenizer.
        token_ids: the generated tokens, a stop token included.
        finish_reason: `stop` (an end token or a stop string), `length` (max_tokens or
            the end of the context), `abort`; None while it is running.
        stop_reason: the stop string or stop token that ended it, if one did.
        logprobs: one entry per token, if they were asked for.
        cumulative_logprob: the sum over the tokens, if they were asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request with its answers.

    Attributes:
        request_id: unique within the engine.
        prompt: the prompt as text, if it came as text.
        prompt_token_ids: the prompt as the model sees it.
        outputs: the answers.
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
        finished: no more tokens will come.
        prompt_logprobs: one entry per prompt token, if they were asked for; None for the
            first, which nothing precedes.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int = 0
    finished: bool = False
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A text as a vector.

    Attributes:
        prompt_token_ids: the text as the model saw it.
        embedding: the vector.
    """

    prompt_token_ids: tuple[int, ...]
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """What a classifier says of a text.

    Attributes:
        prompt_token_ids: the text as the model saw it.
        probs: one number per label. Probabilities, or the raw score of a model with one
            label, such as a reward model.
        label: the name of the highest.
        labels: the names of all, as the model's config has them.
    """

    prompt_token_ids: tuple[int, ...]
    probs: list[float]
    label: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What one step added to one request, from `LLM.stream`.

    Attributes:
        request_id: of this answer; pass it to `LLM.abort`.
        index: the place of its prompt among those given.
        text: the characters that became certain; may be "".
        token_ids: the tokens of this step.
        finish_reason: set on the last delta of an answer.
        output_index: which of the prompt's answers this is.
        logprobs: one entry per token, if they were asked for.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    output_index: int = 0
    logprobs: tuple[Logprobs, ...] = ()
