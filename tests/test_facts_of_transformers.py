"""Every causal language model that the installed transformers defines is read without a mistake.

What a default config really has is told by transformers' own side: the kinds of layers for which
its cache keeps states, or, for the families that keep states of their own, the modules that
their modeling file defines.
"""

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runnerctl.config.facts import ModelFacts
from runnerctl.config.read_facts import facts_from_config

# The words of transformers' cache for layers that keep a recurrent or convolution state.
STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# Layers of both kinds at once.
BOTH = {"hybrid", "hybrid_sliding"}
NOTHING = {"moe", "mlp", "dense", "sparse", "dummy"}
# Modules that carry a state, in families whose config says nothing of layers.
STATE_MODULE = re.compile(
    r"^class (?!\w*(?:Norm|Output|PreTrained|Rotary))\w*?(?:Mamba|Rwkv|mLSTM|xLSTM|Rglru|GatedDelta"
    r"|ShortConv|DeltaAttention|LightningAttention|LinearAttention)\w*\(",
    re.MULTILINE,
)
ATTENTION_MODULE = re.compile(
    r"^class (?!Rwkv|KimiLinear)\w*Attention\w*\(nn\.Module", re.MULTILINE
)


@dataclass
class Family:
    """A model type: its default config, and what transformers' side says it has."""

    config: dict[str, Any]
    config_as_saved: dict[str, Any]
    recurrent: bool
    attention: bool
    says: str

    @property
    def facts(self) -> ModelFacts:
        return facts_from_config(self.config)


def family(architecture, config):
    labels = getattr(config.get_text_config(decoder=True), "layer_types", None)
    if labels:
        kinds = set(labels) - NOTHING
        recurrent, attention = bool(kinds & STATES), bool(kinds - STATES or kinds & BOTH)
        says = f"layer_types {sorted(kinds)}"
    else:
        source = modeling_source(type(config).__module__)
        found = STATE_MODULE.search(source)
        recurrent, attention = bool(found), bool(ATTENTION_MODULE.search(source))
        says = found.group() if found else "no module with a state"
    saved = json.loads(config.to_json_string(use_diff=True))
    whole = json.loads(config.to_json_string(use_diff=False))
    named = {"architectures": [architecture]}
    return Family(whole | named, saved | named, recurrent, attention, says)


def modeling_source(module):
    spec = importlib.util.find_spec(module.replace(".configuration_", ".modeling_"))
    return Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""


@pytest.fixture(scope="module")
def families():
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    found, left_out = {}, []
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = architecture if isinstance(architecture, str) else architecture[0]
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
        except Exception:  # it needs sub-configurations, or an optional package
            left_out.append(model_type)
            continue
        found[model_type] = family(name, config)
    assert len(left_out) < len(found) / 20, left_out
    return found


def test_there_are_many_families_and_of_every_kind(families):
    assert len(families) > 100
    recurrent = {name for name, one in families.items() if one.recurrent}
    assert {"jamba", "mamba", "mamba2", "rwkv", "qwen3_next", "zamba2"} <= recurrent
    assert any(one.recurrent and one.attention for one in families.values())
    assert any(one.recurrent and not one.attention for one in families.values())


def test_none_with_recurrent_layers_is_taken_for_dense_and_no_other_for_recurrent(families):
    wrong = {
        name: (one.says, one.facts.evidence)
        for name, one in families.items()
        if one.recurrent != (one.facts.is_hybrid or one.facts.is_attention_free)
    }
    assert not wrong


def test_none_with_attention_is_taken_for_attention_free(families):
    wrong = {
        name: (one.says, one.facts.evidence)
        for name, one in families.items()
        if one.attention and one.facts.is_attention_free
    }
    assert not wrong
    # Heads are set in the default configs of these two, and no layer has them: on the safe side
    # they are hybrid, where the KV cache is there in vain.
    hybrid = {name for name, one in families.items() if one.facts.is_hybrid and not one.attention}
    assert hybrid <= {"bamba", "granitemoehybrid"}


def test_experts_are_told_from_one_expert_and_none(families):
    """Each of these defines expert modules; its default config says whether it has any."""
    dense = {"dots1", "gemma4_text", "hunyuan_v1_moe"} & families.keys()
    for name in dense:
        config = families[name].config
        assert (config.get("n_routed_experts") or config.get("num_experts") or 0) <= 1
        assert not families[name].facts.is_moe
    if "doge" in families:  # it counts experts beside a switch that is off
        assert families["doge"].config["num_experts"] > 1
        assert not families["doge"].facts.is_moe
    for name in {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "dbrx"} & families.keys():
        assert families[name].facts.is_moe


def test_a_config_as_it_is_saved_says_the_same_as_the_whole(families):
    wrong = {}
    for name, one in families.items():
        saved, whole = facts_from_config(one.config_as_saved), one.facts
        differing = {
            fact: (getattr(saved, fact), getattr(whole, fact))
            for fact in ModelFacts.__dataclass_fields__
            if fact != "evidence" and getattr(saved, fact) != getattr(whole, fact)
        }
        if differing:
            wrong[name] = differing
    assert not wrong


def test_they_generate_text_and_have_layers(families):
    assert not [name for name, one in families.items() if one.facts.runner_type != "generate"]
    # a default config may lack its text side altogether, as a draft model's that is given one
    whole = {n: one for n, one in families.items() if one.config.get("text_config", {}) is not None}
    assert len(whole) > len(families) - 5
    assert not [name for name, one in whole.items() if not one.facts.num_hidden_layers]
