"""`facts_from_config`: from a `config.json` of any spelling to `ModelFacts`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from runnerctl.config.config_keys import (
    NATIVE,
    Entry,
    as_count,
    as_flag,
    entries_of,
    first_count,
    word_set,
    words_of,
)
from runnerctl.config.experts import read_experts
from runnerctl.config.facts import ModelFacts
from runnerctl.config.layer_layout import Layout, read_layout
from runnerctl.config.runner_type import read_runner_type
from runnerctl.config.token_mixing import read_mixing

# Words of the sub-configurations that take something other than text.
MODALITY = word_set("vision visual vit image video audio speech sound whisper")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count")
DECODER_LAYER_KEYS = ("num_decoder_layers", "decoder_layers", "dec_layers")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups")
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "model_max_length",
    "n_ctx",
    "max_target_positions",
    "max_context_length",
    "context_length",
    "seq_length",
)


# Two configurations, or two numbers of layers, are two models.
ENCODER_AND_DECODER = (
    ("encoder", "decoder"),
    ("encoder_config", "decoder_config"),
    ("encoder_layers", "decoder_layers"),
)


def facts_from_config(config: Mapping[str, Any], known: Collection[str] = ()) -> ModelFacts:
    """Reads what a model is from its config, by the meaning of keys, at any nesting.

    Never raises on odd values; what cannot be told becomes a sentence in `uncertain`.

    Args:
        config: the object in a `config.json`.
        known: facts that are known from elsewhere; no doubt about them is worth telling.
    """
    model_type = config.get("model_type")
    model_type = model_type if isinstance(model_type, str) else ""
    architectures = _architectures(config)
    entries = entries_of(config)
    layout = read_layout(entries)
    is_encoder_decoder = _encoder_decoder(config, architectures)
    layers = _layers(entries, layout, decoder_first=bool(is_encoder_decoder))

    name = " ".join((_text_model_type(config, model_type), *architectures)).strip()
    mixing = read_mixing(entries, layout, layers, name)
    experts = read_experts(entries, layout, layers, name)
    runner_type, pooling, doubt = read_runner_type(config, architectures, model_type)
    both = (mixing.recurrent, mixing.attention)
    hybrid = all(both)
    attention_free = bool(mixing.recurrent and not mixing.attention)
    evidence = {
        "is_moe": experts.evidence,
        "is_hybrid": "; ".join(dict.fromkeys(both)) if hybrid else "",
        "is_attention_free": mixing.recurrent if attention_free else "",
        "is_mla": _latent_attention(entries),
        "is_encoder_decoder": is_encoder_decoder,
        "is_multimodal": _multimodal(config),
        "runner_type": pooling,
    }
    evidence = {fact: said for fact, said in evidence.items() if said}
    return ModelFacts(
        model_type=model_type,
        architectures=architectures,
        runner_type=runner_type,
        is_moe="is_moe" in evidence,
        is_hybrid=hybrid,
        is_attention_free=attention_free,
        is_mla="is_mla" in evidence,
        is_encoder_decoder="is_encoder_decoder" in evidence,
        is_multimodal="is_multimodal" in evidence,
        num_hidden_layers=layers,
        num_attention_heads=None if attention_free else first_count(entries, *HEAD_KEYS),
        num_key_value_heads=None if attention_free else first_count(entries, *KV_HEAD_KEYS),
        max_position_embeddings=None if attention_free else first_count(entries, *LENGTH_KEYS),
        evidence=evidence,
        uncertain=tuple(
            said
            for said, facts in (
                (mixing.uncertain, {"is_hybrid", "is_attention_free"}),
                (experts.uncertain, {"is_moe"}),
                (doubt, {"runner_type"}),
            )
            if said and not facts.intersection(known)
        ),
    )


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures")
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, list | tuple):
        return ()
    return tuple(name for name in names if isinstance(name, str))


def _text_model_type(config: Mapping[str, Any], model_type: str) -> str:
    """The model type of the text side where it has its own."""
    for key, value in config.items():
        if isinstance(key, str) and isinstance(value, Mapping) and NATIVE & set(words_of(key)):
            inner = value.get("model_type")
            if isinstance(inner, str) and inner:
                return inner
    return model_type


def _layers(entries: Sequence[Entry], layout: Layout, *, decoder_first: bool) -> int | None:
    keys = DECODER_LAYER_KEYS + LAYER_KEYS if decoder_first else LAYER_KEYS + DECODER_LAYER_KEYS
    return first_count(entries, *keys) or layout.length or None


def _latent_attention(entries: Sequence[Entry]) -> str:
    said = ""
    for entry in entries:
        words = set(entry.words)
        if words >= {"use", "mla"} and as_flag(entry.value) is False:
            return ""
        if words >= {"use", "mla"} and as_flag(entry.value):
            said = said or entry.said
        if words >= {"kv", "lora"} and first_count([entry], "_".join(entry.words)):
            said = said or entry.said
    return said


def _encoder_decoder(config: Mapping[str, Any], architectures: Sequence[str]) -> str:
    flag = as_flag(config.get("is_encoder_decoder"))
    if flag is True:
        return "is_encoder_decoder = True"
    if flag is False:
        return ""
    if any("CausalLM" in name for name in architectures):
        return ""  # one stack, in parts: bytes into patches and back, say
    for left, right in ENCODER_AND_DECODER:
        if config.get(left) and config.get(right):
            return f"{left} and {right}"
    return ""


def _multimodal(config: Mapping[str, Any]) -> str:
    """The key that takes something beside text, or ""."""
    keys = {key: set(words_of(key)) for key in config if isinstance(key, str)}
    has_text_side = any(
        NATIVE & words and isinstance(config[key], Mapping) for key, words in keys.items()
    )
    if not has_text_side and not keys.keys() & {"vocab_size", "d_model", *LAYER_KEYS}:
        return ""  # pictures or sound alone
    for key, words in keys.items():
        if _takes_more_than_text(key, words, config, has_text_side):
            return key
    if not any("config" in words and words & MODALITY for words in keys.values()):
        for key, words in keys.items():
            token = words & MODALITY and "token" in words and words & {"id", "index"}
            if token and as_count(config[key]) is not None:
                return key
    thinker = config.get("thinker_config")
    inner = _multimodal(thinker) if isinstance(thinker, Mapping) else ""
    return f"thinker_config.{inner}" if inner else ""


def _takes_more_than_text(
    key: str, words: set[str], config: Mapping[str, Any], has_text_side: bool
) -> bool:
    value = config[key]
    if isinstance(value, Mapping):
        encoder = key == "encoder_config" and has_text_side and "decoder_config" not in config
        return bool(value) and (encoder or bool(words & MODALITY))
    if words >= {"vision", "tower"}:
        return isinstance(value, str) and bool(value)
    return words >= {"num", "mel", "bins"} and bool(as_count(value)) and "vocab_size" in config
