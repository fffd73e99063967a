"""The keys of a `config.json` as words, so that facts are read from meaning, not from spelling.

`numExperts`, `num_experts` and `moe.num_experts` name the same thing. Everything
here takes any JSON value, however odd, and never raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_DEPTH = 6
MAX_ITEMS = 512  # objects looked at in a list, one per layer as a rule


def word_set(words: str) -> frozenset[str]:
    """A set of words, written as one string."""
    return frozenset(words.split())


# Sub-configurations that describe something other than the language decoder.
FOREIGN = word_set(
    "vision visual vit image images video audio speech sound whisper encoder talker code2wav "
    "token2wav dit vae codec vq projector perceiver qformer resampler detector mtp nextn "
    "draft speculative eagle quantization quant rope generation id2label label2id task peft "
    "tokenizer"
)
# ... unless the name also says that it is the text side.
NATIVE = word_set("text llm language lm decoder thinker")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a config, wherever it is nested.

    Attributes:
        path: the dotted spelling, for evidence.
        words: the key in words.
        context: the words of the sub-configurations around it.
        value: as in the config.
    """

    path: str
    words: tuple[str, ...]
    context: tuple[str, ...]
    value: Any

    @property
    def said(self) -> str:
        """Key and value, as evidence shown to a user."""
        text = str(self.value) if not isinstance(self.value, str) else repr(self.value)
        return f"{self.path} = {text if len(text) <= 60 else text[:57] + '...'}"


@lru_cache(maxsize=4096)
def words_of(key: str) -> tuple[str, ...]:
    """The words of a key: `numExperts`, `num-experts` and `NUM_EXPERTS` give the same."""
    key = key[:200].replace("MoE", "Moe")
    key = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", key)
    key = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", key).lower()
    key = re.sub(r"experts?", r"_\g<0>_", key)
    return tuple(re.findall(r"[a-z0-9]+", key))


def entries_of(config: Mapping[Any, Any]) -> list[Entry]:
    """Every key that speaks of the language decoder, the text side's own keys first."""
    found = list(_walk(config, "", (), 0))
    return sorted(found, key=lambda entry: not NATIVE.intersection(entry.context))


def _walk(
    config: Mapping[Any, Any], prefix: str, context: tuple[str, ...], depth: int
) -> Iterator[Entry]:
    for key, value in config.items():
        if not isinstance(key, str):
            continue
        words = words_of(key)
        if FOREIGN.intersection(words) and (
            "encoder" in words or not NATIVE.intersection(words) or "mtp" in words
        ):
            continue
        yield Entry(prefix + key, words, context, value)
        if isinstance(value, Mapping) and depth < MAX_DEPTH:
            yield from _walk(value, f"{prefix}{key}.", context + words, depth + 1)
        elif isinstance(value, list | tuple) and depth < MAX_DEPTH:
            for index, item in enumerate(value[:MAX_ITEMS]):
                if isinstance(item, Mapping):
                    yield from _walk(item, f"{prefix}{key}[{index}].", context + words, depth + 1)


def as_number(value: Any) -> float | None:
    """The number a JSON value holds, also one in quotes; None for anything else, and for bools."""
    if isinstance(value, str):
        text = value.strip()
        if not re.fullmatch(r"[+-]?\d{1,15}(\.\d{1,15})?", text):
            return None
        value = float(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) < 10**15 else None
    return value if abs(value) < 1e15 else None


def as_count(value: Any) -> int | None:
    """The whole number >= 0 that a JSON value holds, or None."""
    number = as_number(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def as_flag(value: Any) -> bool | None:
    """A boolean, also one in quotes; None for anything else."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def as_index_list(value: Any) -> list[int] | None:
    """A list of whole numbers (the empty one too), or None."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None
    counts = [as_count(item) for item in value]
    return None if None in counts else [count for count in counts if count is not None]


def first_count(entries: Sequence[Entry], *keys: str) -> int | None:
    """The first count > 0 under one of these keys, in the order of preference given.

    The text side's own value goes before one at the top.
    """
    for key in keys:
        wanted = words_of(key)
        for entry in entries:
            if entry.words == wanted and (count := as_count(entry.value)):
                return count
    return None
