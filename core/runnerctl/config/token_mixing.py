"""How the layers of a model mix tokens: by attention, by a recurrent state, or both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from runnerctl.config.config_keys import (
    Entry,
    as_count,
    as_flag,
    as_index_list,
    as_number,
    word_set,
    words_of,
)
from runnerctl.config.layer_layout import RECURRENT, RECURRENT_PHRASE, Layout

# Parameters only a layer with a recurrent or convolution state has, spelled without its name.
STATE_PARAMETER = re.compile(
    r"^(?:ssm_)?state_size$|^(?:ssm_)?d_state$|^time_step_rank$|^conv_l_cache$|conv_states$"
    r"|^cca_|^linear_(?:num|key|value|head|conv)_|time_decay|time_mix|decay_low_rank"
)
HEADS = frozenset({"head", "heads"})
ATTENTION = frozenset({"attention", "attn"})
NOT_ATTENTION_HEADS = word_set("size dim index indexer classifier lm drop dropout scale")
INDICES = word_set("idx idxs indices index ids id layers")
PERIOD = word_set("period interval every freq frequency")
SWITCH = word_set("use using enable enabled is has with")
PLACE = ATTENTION | INDICES | PERIOD | {"full", "softmax", "layer", "n"}


@dataclass(frozen=True, slots=True)
class Mixing:
    """Which kinds of token mixing a config describes, each with its evidence, "" for none."""

    recurrent: str = ""
    attention: str = ""
    uncertain: str = ""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a config puts attention, by index or period: `all`, `some` or unsaid ("")."""

    attention: str = ""
    said: str = ""


def read_mixing(entries: Sequence[Entry], layout: Layout, layers: int | None, name: str) -> Mixing:
    """Reads which kinds of layers there are.

    Args:
        entries: the keys that speak of the decoder.
        layout: what lists of layer labels say; they go before everything else.
        layers: number of layers, None if unknown.
        name: model type and architectures, a last resort where no key tells.
    """
    parameters = _recurrent_parameters(entries, name)
    if layout.hybrid_word:
        parameters = parameters or _convolution(entries)
    heads = _attention_heads(entries, surely=bool(parameters))
    if "rwkv" in name.lower() and not layout.attention:
        # Its `num_attention_heads` are those of the state; real attention has its own section.
        beside = [entry for entry in entries if ATTENTION.intersection(entry.context)]
        heads = _attention_heads(beside, surely=False)
        return Mixing(parameters or f"the model is called {name!r}", heads)
    if layout.recurrent or layout.attention or layout.hybrid_word:
        return _by_labels(layout, parameters, heads)
    mixing = _by_places(entries, parameters, heads, layers)
    if layout.unknown and not mixing.uncertain:
        return replace(mixing, uncertain=f"{_unknown(layout)}; other keys say what the model is")
    return mixing


def _unknown(layout: Layout) -> str:
    labels = ", ".join(repr(label) for label in layout.unknown[:3])
    return f"what layers labelled {labels} are is not known"


def _by_labels(layout: Layout, parameters: str, heads: str) -> Mixing:
    recurrent, attention = layout.recurrent, layout.attention
    doubt = ""
    if layout.hybrid_word:
        # The word does not say what is mixed; other keys do.
        recurrent = recurrent or parameters
        attention = attention or heads or layout.hybrid_word
        if not recurrent:
            doubt = (
                f"{layout.hybrid_word}, but no key describes a recurrent layer; it is taken for a "
                "mix of kinds of attention"
            )
    elif recurrent and not attention and heads:
        attention = heads
        doubt = (
            f"no layer is labelled attention, yet {heads}; the model is taken for one that has "
            "both kinds of layers"
        )
    elif layout.unknown and not recurrent and parameters:
        recurrent = parameters
        doubt = (
            f"layers labelled {layout.unknown[0]!r} are taken for recurrent ones, because of "
            f"{parameters}"
        )
    elif layout.unknown and not (recurrent and attention):
        taken = "recurrent ones" if recurrent else "attention"
        doubt = f"{_unknown(layout)}; they are taken for {taken}"
    return Mixing(recurrent, attention, doubt)


def _by_places(entries: Sequence[Entry], parameters: str, heads: str, layers: int | None) -> Mixing:
    if parameters and _no_recurrent_layer(entries):
        return Mixing(attention=heads or "no recurrent layer")
    places = _attention_places(entries, layers)
    if parameters:
        if places.attention == "all":
            return Mixing(attention=places.said)
        return Mixing(parameters, places.said if places.attention == "some" else heads)
    if places.attention == "some" and not _has_window(entries):
        doubt = (
            f"{places.said} leaves layers without full attention, and no key says what they are; "
            "they are taken for recurrent ones"
        )
        return Mixing(places.said, places.said, doubt)
    if heads:
        return Mixing(attention=heads)
    return Mixing(
        uncertain="the config does not say how layers mix tokens (no attention heads, "
        "no recurrent state); attention is assumed"
    )


def _recurrent_parameters(entries: Sequence[Entry], name: str) -> str:
    switches = [e for e in entries if _is_switch(e)]
    if any(as_flag(entry.value) is False for entry in switches):
        return ""
    for entry in entries:
        if _names_recurrent(entry) and _is_live(entry):
            return entry.said
    kinds = [entry for entry in entries if _type_list(entry) is not None]
    grouped = [e for e in entries if e.words == ("layer", "group", "size")]
    named = RECURRENT.intersection(words_of(name)) or "linear" in words_of(name)
    if grouped and named and (as_count(grouped[0].value) or 0) > 1:
        return grouped[0].said
    if named and not kinds and not _attention_heads(entries, surely=True):
        return f"the model is called {name!r}"
    return ""


def _convolution(entries: Sequence[Entry]) -> str:
    """A convolution over tokens, which only a label of mixed layers makes one of the decoder's."""
    sizes = (e for e in entries if {"conv", "kernel"} <= set(e.words) and as_count(e.value))
    return next((entry.said for entry in sizes), "")


def _names_recurrent(entry: Entry) -> bool:
    """Whether a key is about recurrent layers."""
    words = entry.context + entry.words
    if {"cache", "indexer"}.intersection(words) and "lru" in words:
        return False
    if "lightning" in words and {"indexer", "index"}.intersection(words):
        return False
    spelled = "_".join(entry.words)
    return bool(
        RECURRENT.intersection(words)
        or RECURRENT_PHRASE.search("_".join(words))
        or STATE_PARAMETER.search(spelled)
    )


def _is_switch(entry: Entry) -> bool:
    """`use_mamba`, and not `use_mamba_kernels`."""
    if as_flag(entry.value) is None:
        return False
    rest = "_".join(word for word in entry.words if word not in SWITCH)
    return rest in RECURRENT | {"linear_attention", "linear_attn", "short_conv"}


def _is_live(entry: Entry) -> bool:
    """Whether a key's value makes its layers exist: a size, a flag that turns them on."""
    value = entry.value
    if isinstance(value, Mapping):  # its keys speak for themselves, where there are any
        return not value and entry.words == ("ssm", "cfg")
    if as_flag(value) is not None:
        return as_flag(value) is True and _is_switch(entry)
    if isinstance(value, list | tuple):
        return any(as_number(item) is not None for item in value)
    number = as_number(value)
    return number is not None and number != 0


def _attention_heads(entries: Sequence[Entry], *, surely: bool) -> str:
    """The key that gives the model attention heads, or "".

    Args:
        entries: the keys that speak of the decoder.
        surely: do not take a plain `num_heads`, which Mamba-2 and others use too.
    """
    for entry in entries:
        words = set(entry.words) | (set(entry.context) & ATTENTION)
        if not HEADS & words or NOT_ATTENTION_HEADS & words or _names_recurrent(entry):
            continue
        value = entry.value
        most = max(as_index_list(value) or [as_count(value) or 0])
        named = ATTENTION & words or {"kv", "key", "query", "q"} & words
        plain = entry.words in {("n", "head"), ("n", "heads"), ("num", "heads"), ("heads",)}
        sure = named or (plain and entry.words[0] == "n")
        if most > 0 and (sure or (plain and not surely)):
            return entry.said
    return ""


def _no_recurrent_layer(entries: Sequence[Entry]) -> bool:
    """Whether the recurrent layers are counted or listed, and there are none."""
    for entry in entries:
        kinds = _type_list(entry)
        if kinds:
            return all(kinds)
        if not _names_recurrent(entry) or "layers" not in entry.words:
            continue
        if ATTENTION & set(entry.words) and "full" in entry.words:
            continue
        if as_index_list(entry.value) == [] or as_count(entry.value) == 0:
            return True
    return False


def _type_list(entry: Entry) -> list[int] | None:
    """A list of numbers that gives each layer's kind of attention, 0 being the linear kind."""
    if ATTENTION & set(entry.words) and {"type", "types"} & set(entry.words):
        return as_index_list(entry.value)
    return None


def _attention_places(entries: Sequence[Entry], layers: int | None) -> _Places:
    for entry in _place_keys(entries):
        words = set(entry.words)
        period = as_count(entry.value)
        if words & PERIOD and period:
            return _Places("all" if period == 1 else "some", entry.said)
        indices = as_index_list(entry.value)
        if words & INDICES and indices:
            covered = layers is not None and len(set(indices)) >= layers
            return _Places("all" if covered else "some", entry.said)
    return _Places()


def _place_keys(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Keys about where attention is, and about no single kind of it."""
    for entry in entries:
        words = set(entry.words)
        if (words & ATTENTION and words <= PLACE) or entry.words == ("hybrid", "layer", "ids"):
            yield entry


def _has_window(entries: Sequence[Entry]) -> bool:
    """Whether the layers without full attention can be layers with a window."""
    return any(
        {"window", "chunk"}.intersection(entry.words)
        and {"sliding", "attention", "size"}.intersection(entry.words)
        and as_count(entry.value)
        for entry in entries
    )
