"""`PoolingParams`: what one request wants to be made of its hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from runnerctl.errors import UserError

PoolingMode = Literal["cls", "mean", "max", "last", "mean_sqrt_len", "weighted_mean"]
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Where a field is None, the model's own files decide.

    Attributes:
        pooling: how the vectors of the tokens become one: `cls` (the first token's), `last`,
            `mean`, `max`, `mean_sqrt_len` (the sum over the square root of the length),
            `weighted_mean` (later tokens weigh more).
        normalize: scale the embedding to length 1, or do not.
        dimensions: keep this many of the embedding's first numbers, for models that were
            trained for it.
        activation: of a classifier: False gives the raw scores instead of probabilities.
        truncate_prompt_tokens: cut longer texts to this many tokens, special tokens
            included; -1 is the longest the model takes. None refuses texts that are too long.
        prompt_name: the instruction of `config_sentence_transformers.json` to put in front of
            texts; "" leaves out the default one.

    Raises:
        UserError: a value out of range; names the field.
    """

    pooling: PoolingMode | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    activation: bool = True
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in POOLING_MODES:
            raise _wrong("pooling", self.pooling, f"one of {', '.join(POOLING_MODES)}")
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise _wrong("normalize", self.normalize, "True, False or None")
        if self.dimensions is not None and not _is_count(self.dimensions):
            raise _wrong("dimensions", self.dimensions, "a whole number from 1")
        if not isinstance(self.activation, bool):
            raise _wrong("activation", self.activation, "True or False")
        limit = self.truncate_prompt_tokens
        if limit is not None and limit != -1 and not _is_count(limit):
            raise _wrong("truncate_prompt_tokens", limit, "-1 or a whole number from 1")
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise _wrong("prompt_name", self.prompt_name, "text")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _wrong(name: str, value: object, expected: str) -> UserError:
    return UserError(f"{name} is {value!r}", remedy=f"it must be {expected}", setting=name)
