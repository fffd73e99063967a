"""`SamplingParams`: how one request's tokens are chosen and when it stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runnerctl.errors import UserError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names and meanings follow the field's offline APIs.

    Attributes:
        n: answers to each prompt; answer i uses `seed` + i.
        max_tokens: tokens to generate at most.
        min_tokens: before as many, no end token is sampled and no stop string ends the text.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p.
        min_p: drop tokens less likely than `min_p` times the most likely one.
        repetition_penalty: above 1, tokens of prompt and answer become less likely; 1 is off.
        presence_penalty: taken off the logit of each token that is in the answer.
        frequency_penalty: taken off for each time a token is in the answer.
        logit_bias: token id -> number added to its logit.
        bad_words: strings that are not to appear, with or without a space before them.
        bad_words_token_ids: sequences of tokens that are not to appear.
        seed: makes the request reproducible, whatever else is in the batch. A request
            without one gets a random seed when it is admitted.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, next to the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: with each token, its log-probability and those of this many likeliest
            tokens; None is off.
        prompt_logprobs: the same for the tokens of the prompt. Such a request takes
            nothing from the prefix cache.

    Raises:
        UserError: a value out of range; names the field.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._normalise()
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        fits = 0 <= self.min_tokens <= self.max_tokens
        _require(fits, "min_tokens", self.min_tokens, "from 0 to max_tokens")
        _require(
            0 <= self.temperature < float("inf"),
            "temperature",
            self.temperature,
            "a finite number, 0 or above",
        )
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 1, or 0 for no limit")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        positive = 0 < self.repetition_penalty < float("inf")
        _require(positive, "repetition_penalty", self.repetition_penalty, "above 0; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "from -2 to 2")
        biases = [bias for _, bias in self.logit_bias]  # type: ignore[misc]
        finite = all(abs(bias) < float("inf") for bias in biases)
        _require(finite, "logit_bias", self.logit_bias, "finite numbers by token id")
        _require(
            all(self.bad_words), "bad_words", list(self.bad_words), "text, not an empty string"
        )
        words = self.bad_words_token_ids
        _require(all(words), "bad_words_token_ids", words, "non-empty lists of token ids")
        _require(all(self.stop), "stop", list(self.stop), "text; an empty string ends nothing")
        seed_fits = self.seed is None or -(2**63) <= self.seed < 2**63
        _require(seed_fits, "seed", self.seed, "an integer of 64 bits")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or count >= 0, name, count, "at least 0, or None")

    def _normalise(self) -> None:
        """One string is a common slip for a list of one; tuples keep the value hashable."""
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            self._set(name, (value,) if isinstance(value, str) else tuple(value or ()))
        self._set("stop_token_ids", tuple(self.stop_token_ids or ()))
        self._set("bad_words_token_ids", tuple(map(tuple, self.bad_words_token_ids or ())))
        bias = self.logit_bias or ()
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        self._set("logit_bias", tuple((int(token), float(value)) for token, value in pairs))
        if self.top_k == -1:
            self._set("top_k", 0)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value!r}", remedy=f"it must be {expected}", setting=name)
