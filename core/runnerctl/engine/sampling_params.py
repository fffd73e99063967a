"""`SamplingParams`: how one request's tokens are chosen and when it stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from operator import index
from typing import Any

from runnerctl.errors import UserError

_MANY = 2**31 - 1
_WHOLE_NUMBERS = {
    "n": (1, 2**16),
    "max_tokens": (1, _MANY),
    "min_tokens": (0, _MANY),
    "top_k": (-1, _MANY),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, _MANY),
    "prompt_logprobs": (0, _MANY),
}
_NUMBERS = {
    "temperature": (0, 1e6),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 1e6),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_MAY_BE_NONE = frozenset({"seed", "logprobs", "prompt_logprobs"})


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
        for name, whole in _WHOLE_NUMBERS.items():
            self._check_number(name, int, *whole)
        for name, limits in _NUMBERS.items():
            self._check_number(name, float, *limits)
        self._set("top_k", max(self.top_k, 0))
        fits = self.min_tokens <= self.max_tokens
        _require(fits, "min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        for name in ("top_p", "repetition_penalty"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("stop", "bad_words"):
            self._check_strings(name)
        self._check_token_ids()

    def _check_number(self, name: str, kind: type, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is None and name in _MAY_BE_NONE:
            return
        # numpy's numbers are as good; True is always a mistake
        is_number = isinstance(value, Integral if kind is int else Real)
        noun = "a whole number" if kind is int else "a number"
        fits = is_number and not isinstance(value, bool) and low <= value <= high
        _require(fits, name, value, f"{noun} from {low} to {high}")
        self._set(name, kind(value))

    def _check_strings(self, name: str) -> None:
        """One string is a common slip for a list of one; tuples keep the value hashable."""
        value = getattr(self, name)
        strings = (value,) if isinstance(value, str) else tuple(value or ())
        fits = all(isinstance(one, str) and one for one in strings)
        _require(fits, name, list(strings), "text, none of it empty")
        self._set(name, strings)

    def _check_token_ids(self) -> None:
        try:
            bias = self.logit_bias or ()
            pairs = bias.items() if isinstance(bias, Mapping) else bias
            self._set("logit_bias", tuple((index(token), float(add)) for token, add in pairs))
            words = [tuple(index(token) for token in word) for word in self.bad_words_token_ids]
            self._set("bad_words_token_ids", tuple(words))
            self._set("stop_token_ids", tuple(index(token) for token in self.stop_token_ids or ()))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"a token id or bias is of the wrong type ({error})",
                remedy="give stop_token_ids as ints, bad_words_token_ids as lists of ints, "
                "logit_bias as {int: number}",
                setting="sampling_params",
            ) from error
        finite = all(isfinite(bias) for _, bias in self.logit_bias)  # type: ignore[misc]
        _require(finite, "logit_bias", self.logit_bias, "finite numbers by token id")
        banned = self.bad_words_token_ids
        _require(
            all(banned), "bad_words_token_ids", banned, "lists of token ids, none of them empty"
        )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value!r}", remedy=f"it must be {expected}", setting=name)
