"""`SamplingParams`: how one request's tokens are chosen and when it stops."""

from __future__ import annotations

from dataclasses import dataclass

from runnerctl.errors import UserError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names and meanings follow the field's offline APIs.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p.
        seed: makes the request reproducible, whatever else is in the batch. A request
            without one gets a random seed when it is admitted.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, next to the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        UserError: a value out of range; names the field.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # One string is a common slip for a list of one; tuples keep the value hashable.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 <= self.temperature < float("inf"), "temperature", self.temperature, ">= 0")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 1, or 0 for no limit")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(all(stop), "stop", stop, "non-empty strings")
        seed_fits = self.seed is None or -(2**63) <= self.seed < 2**63
        _require(seed_fits, "seed", self.seed, "an integer of 64 bits")

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value!r}", remedy=f"it must be {expected}", setting=name)
