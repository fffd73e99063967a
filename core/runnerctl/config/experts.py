"""Whether a config describes a mixture of experts: more than one expert to route to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runnerctl.config.config_keys import Entry, as_count, as_flag, as_index_list, word_set, words_of
from runnerctl.config.layer_layout import Layout

COUNT_WORDS = word_set("num n nb nr no number count total")
FILLER = word_set("use using enable enabled is has with block layer layers")

# Words that make a key about something other than the number of routed experts.
NOT_ROUTED = word_set("shared share zero null dummy identity copy constant redundant fused")
NOT_A_COUNT = word_set(
    "tok token tokens top topk k used active activated selected chosen group groups size dim "
    "hidden intermediate ffn_dim capacity factor parallel ep rank ranks loss coef coefficient "
    "scale scaling bias dropout policy fn function id ids idx index indices period offset "
    "interval freq frequency step start end strategy combination overlap type dtype weight "
    "weights sink latent pad padding"
)


@dataclass(frozen=True, slots=True)
class Experts:
    """What a config says about experts; `evidence` is empty for a dense model."""

    evidence: str = ""
    uncertain: str = ""


def read_experts(
    entries: Sequence[Entry], layout: Layout, layers: int | None, name: str
) -> Experts:
    """Reads the number of experts to route to and whether any layer has them.

    Args:
        entries: the keys that speak of the decoder.
        layout: what is known of the single layers.
        layers: their number, None if unknown.
        name: model type and architectures, only to point out a doubt.
    """
    counts = [entry for entry in entries if _counts_experts(entry)]
    many = next((entry for entry in counts if _most_experts(entry.value) > 1), None)
    if many is not None:
        return Experts() if _no_expert_layer(entries, layout, layers) else Experts(many.said)
    if counts or _no_expert_layer(entries, layout, layers):
        return Experts()
    for entry in entries:
        if _counts_experts_per_token(entry) and (as_count(entry.value) or 0) > 1:
            doubt = f"{entry.said}, but the config does not say how many experts there are"
            return Experts(entry.said, f"{doubt}; it is taken for a mixture of experts")
    if layout.expert_layers:
        doubt = f"{layout.expert_layers} has expert layers, but no key says how many experts"
        return Experts(layout.expert_layers, f"{doubt}; it is taken for a mixture of experts")
    if {"moe", "mixtral"}.intersection(words_of(name)) or "moe" in name.lower():
        return Experts(
            uncertain="the name suggests a mixture of experts, but no key of the config says how "
            "many experts there are; it is taken for dense"
        )
    return Experts()


def _counts_experts(entry: Entry) -> bool:
    words, around = set(entry.words), set(entry.context)
    if NOT_ROUTED & (words | around) or NOT_A_COUNT & words:
        return False
    if words & {"layer", "layers"} and "per" not in words:
        return False
    if "experts" in words:
        return True
    if "expert" in words:
        return bool(words & COUNT_WORDS)
    return words <= COUNT_WORDS and bool(around & {"expert", "experts", "moe", "mixture"})


def _counts_experts_per_token(entry: Entry) -> bool:
    words = set(entry.words)
    if NOT_ROUTED & words or not words & {"expert", "experts", "moe"}:
        return False
    return bool(words & {"topk", "used", "active", "activated"}) or (
        "per" in words and bool(words & {"tok", "token"})
    )


def _most_experts(value: Any) -> int:
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, Mapping) for item in value):
            return len(value)
        return max((_most_experts(item) for item in value), default=0)
    return as_count(value) or 0


def _no_expert_layer(entries: Sequence[Entry], layout: Layout, layers: int | None) -> bool:
    """Whether the config, whatever its expert count, gives the experts to no layer."""
    if layout.names_dense_layers and not layout.expert_layers:
        return True
    return any(_switches_off(entry, layers) for entry in entries)


def _switches_off(entry: Entry, layers: int | None) -> bool:
    words = set(entry.words)
    if words & {"moe", "experts"} and words - FILLER <= {"moe", "experts"}:
        nowhere = "layers" in words and as_index_list(entry.value) == []
        return nowhere or as_flag(entry.value) is False
    if words >= {"moe", "layer"} and words & {"freq", "frequency"}:
        flags = as_index_list(entry.value)
        return bool(flags) and not any(flags or [])
    return _leaves_no_layer("_".join(entry.words), entry.value, layers)


def _leaves_no_layer(key: str, value: Any, layers: int | None) -> bool:
    count = as_count(value)
    if key == "interleave_moe_layer_step":
        return count == 0
    if layers is None:
        return False
    if key == "mlp_only_layers":
        return set(as_index_list(value) or []) >= set(range(layers))
    if key in {"first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"}:
        return count is not None and count >= layers
    return key == "decoder_sparse_step" and count is not None and count > layers
