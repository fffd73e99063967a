"""What the layers of a model are, read from lists of labels and from pattern strings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runnerctl.config.config_keys import Entry, as_count, word_set, words_of

# What mixes tokens through a state of fixed size, in the words of labels and keys.
RECURRENT = word_set(
    "mamba mamba1 mamba2 mamba3 ssm rwkv rwkv4 rwkv5 rwkv6 rwkv7 wkv lru rglru gdn kda "
    "deltanet retention retnet mlstm slstm xlstm hgrn hgrn2 hyena gla griffin shortconv "
    "lightning s4 s6"
)
RECURRENT_PHRASE = re.compile(
    r"(?:^|_)(?:(?:linear|lightning|delta|kimi_delta)_(?:attention|attn)|gated_delta|delta_net"
    r"|delta_rule|short_conv|rg_lru)(?:_|$)"
)
RECURRENT_LABEL = RECURRENT | word_set("recurrent recurrence rnn linear conv conv1d delta")
ATTENTION_LABEL = word_set(
    "attention attn full sliding global local swa mha gqa mqa mla softmax window windowed "
    "chunked transformer lsh"
)
DENSE_LABEL = frozenset(["mlp", "ffn", "dense", "feedforward"])
EXPERT_LABEL = frozenset(["moe", "sparse", "expert", "experts"])
NOTHING_LABEL = word_set("no noop none identity skip empty pad")

SYMBOLS = {"M": "mamba", "*": "attention", "A": "attention", "-": "mlp", "E": "moe"}
LAYOUT_KEY = word_set("layer layers block blocks mixer mixers layout temporal")
NOT_A_LAYOUT = word_set("mlp ffn indexer gnn pos norm act activation rope kv")


@dataclass(frozen=True, slots=True)
class Layout:
    """What the lists of layer labels say, taken together.

    Attributes:
        recurrent, attention: the key with such layers, "" if none.
        hybrid_word: the key with layers that are just called hybrid.
        unknown: labels of kinds of layers that say nothing to us, as they are spelled.
        names_dense_layers: the list tells feed-forward layers apart too.
        expert_layers: the key that names layers with experts.
        length: number of layers described, 0 if no list was found.
    """

    recurrent: str = ""
    attention: str = ""
    hybrid_word: str = ""
    unknown: tuple[str, ...] = ()
    names_dense_layers: bool = False
    expert_layers: str = ""
    length: int = 0


def read_layout(entries: Sequence[Entry]) -> Layout:
    """Reads every list of layer labels and every pattern string of a config."""
    recurrent = attention = hybrid_word = expert_layers = ""
    unknown: list[str] = []
    dense = False
    length = 0
    for entry in entries:
        if _is_feed_forward_layout(entry):
            labels = _labels(entry.value)
            dense = dense or bool(labels)
            if any(EXPERT_LABEL.intersection(words_of(label)) for label in labels):
                expert_layers = expert_layers or entry.path
            continue
        labels = _pattern(entry) or (_labels(entry.value) if _is_layout(entry) else [])
        length = length or (len(labels) if len(labels) > 1 else 0)
        for label in dict.fromkeys(labels):
            words = set(words_of(label))
            is_recurrent, is_attention = classify(label)
            said = f"{entry.path} has {label!r}"
            recurrent = recurrent or (said if is_recurrent else "")
            attention = attention or (said if is_attention else "")
            if is_recurrent or is_attention or words & NOTHING_LABEL:
                continue
            if words & EXPERT_LABEL:
                expert_layers = expert_layers or entry.path
            elif words & DENSE_LABEL:
                dense = True
            elif "hybrid" in words:
                hybrid_word = hybrid_word or said
            elif _names_kinds(entry):
                unknown.append(label)
    return Layout(recurrent, attention, hybrid_word, tuple(unknown), dense, expert_layers, length)


def classify(label: str) -> tuple[bool, bool]:
    """Whether a layer label means a recurrent layer, and whether it means attention.

    `mamba_attention` is both, `linear_attention` only recurrent, `mlp` neither.
    """
    words = words_of(label)
    if NOTHING_LABEL.intersection(words):
        return False, False
    spelled = "_".join(words)
    rest = RECURRENT_PHRASE.sub("_", spelled)
    left = set(rest.split("_"))
    recurrent = rest != spelled or bool(left & RECURRENT_LABEL)
    if "hybrid" in left:
        return recurrent, bool(left & {"attention", "attn"})
    # What is left of "linear attention" spelled in other words is not softmax attention.
    attention = bool(left & ATTENTION_LABEL) and not left & {"linear", "lightning", "delta"}
    return recurrent, attention


def _is_feed_forward_layout(entry: Entry) -> bool:
    words = set(entry.words)
    return bool(words & {"mlp", "ffn"}) and bool(words & {"type", "types"})


def _is_layout(entry: Entry) -> bool:
    words = set(entry.words)
    if words & NOT_A_LAYOUT:
        return False
    if isinstance(entry.value, str):  # one label for all layers, or several with commas
        return "mixer" in words or bool(
            words & {"type", "types"} and words & {"attention", "attn", "layer"}
        )
    return bool(words & LAYOUT_KEY)


def _names_kinds(entry: Entry) -> bool:
    """Whether the labels under a key are kinds of layers for sure, and not names of something."""
    if set(entry.words) & {"type", "types", "kind", "kinds", "mixer", "mixers", "pattern"}:
        return True
    value = entry.value
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


def _labels(value: Any) -> list[str]:
    """The labels in a list, an object by layer number, a table of counts or a string."""
    if isinstance(value, str):
        labels = [label.strip() for label in value[:10_000].split(",")]
        return [label for label in labels if any(classify(label))]
    if isinstance(value, Mapping):
        if all(isinstance(label, str) for label in value.values()):
            return [label for key, label in value.items() if str(key).isdigit()]
        return [key for key, count in value.items() if _is_label_count(key, count)]
    if not isinstance(value, list | tuple):
        return []
    named = (_label_in(item) if isinstance(item, Mapping) else item for item in value)
    return [SYMBOLS.get(label, label) for label in named if isinstance(label, str)]


def _is_label_count(key: Any, count: Any) -> bool:
    return (
        isinstance(key, str)
        and bool(as_count(count))
        and len(words_of(key)) <= 2
        and any(classify(key))
    )


def _label_in(item: Mapping[Any, Any]) -> str | None:
    """The string an object has under type, kind or mixer."""
    for key, text in item.items():
        if isinstance(key, str) and {"type", "kind", "mixer"}.intersection(words_of(key)):
            return text if isinstance(text, str) else None
    return None


def _pattern(entry: Entry) -> list[str]:
    """The labels in a string of symbols, as `M*-E`."""
    words = set(entry.words)
    if not isinstance(entry.value, str) or words & {"sliding", "window"}:
        return []
    if not words & (LAYOUT_KEY | {"pattern", "hybrid"}):
        return []
    symbols = entry.value.replace("|", "").replace("/", "")
    if len(symbols) < 2 or not set(symbols) <= SYMBOLS.keys():
        return []
    return [SYMBOLS[symbol] for symbol in symbols]
