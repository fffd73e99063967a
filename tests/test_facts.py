"""Facts of a model from its config: real ones, invented ones, and nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invented_configs import INVENTED, Invented
from runnerctl.config.facts import ModelFacts
from runnerctl.config.read_facts import facts_from_config

GOLDEN = json.loads((Path(__file__).parent / "data" / "model_facts.json").read_text())
FACTS = ("is_moe", "is_hybrid", "is_attention_free", "runner_type")


@pytest.mark.parametrize("entry", GOLDEN, ids=lambda entry: entry["architecture"])
def test_real_configs_have_the_recorded_facts(entry: dict[str, Any]) -> None:
    facts = facts_from_config(entry["config"])
    assert {fact: getattr(facts, fact) for fact in FACTS} == {fact: entry[fact] for fact in FACTS}


@pytest.mark.parametrize("case", INVENTED, ids=lambda case: case.name)
def test_invented_configs_are_read_by_meaning(case: Invented) -> None:
    facts = facts_from_config(case.config)
    expected = {fact: fact in case.true for fact in FACTS[:3]}
    expected["runner_type"] = "pooling" if "pooling" in case.true else "generate"
    for fact in ("is_mla", "is_encoder_decoder", "is_multimodal"):
        expected[fact] = fact in case.true
    assert {fact: getattr(facts, fact) for fact in expected} == expected, facts
    assert bool(facts.uncertain) == case.doubt, facts.uncertain


@pytest.mark.parametrize("case", INVENTED, ids=lambda case: case.name)
def test_every_true_fact_names_its_evidence(case: Invented) -> None:
    facts = facts_from_config(case.config)
    for fact in case.true:
        assert facts.evidence.get("runner_type" if fact == "pooling" else fact)
    assert len(facts.evidence) == len(case.true)


def test_evidence_names_key_and_value() -> None:
    facts = facts_from_config({"ffn_config": {"moe_num_experts": 4}, "n_heads": 2})
    assert facts.evidence["is_moe"] == "ffn_config.moe_num_experts = 4"


def test_evidence_is_not_said_twice() -> None:
    facts = facts_from_config({"attn_layer_period": 8, "num_hidden_layers": 32})
    assert facts.evidence["is_hybrid"] == "attn_layer_period = 8"


def test_sizes_come_from_the_text_side() -> None:
    facts = facts_from_config(
        {
            "text_config": {"num_hidden_layers": 5, "max_position_embeddings": 99},
            "vision_config": {"num_hidden_layers": 27, "max_position_embeddings": 7},
        }
    )
    assert (facts.num_hidden_layers, facts.max_position_embeddings) == (5, 99)


def test_a_decoder_beside_an_encoder_gives_its_own_number_of_layers() -> None:
    config = {"is_encoder_decoder": True, "num_layers": 12, "num_decoder_layers": 3}
    assert facts_from_config(config).num_hidden_layers == 3


def test_layers_are_counted_from_labels_when_no_key_says_how_many() -> None:
    facts = facts_from_config({"hybrid_override_pattern": "M-M*-", "num_attention_heads": 4})
    assert facts.num_hidden_layers == 5


def test_a_recurrent_model_has_no_longest_context() -> None:
    config = {"model_type": "rwkv", "context_length": 1024}
    assert facts_from_config(config).max_position_embeddings is None


KEY_NAMES = """
model_type architectures layer_types layers_block_type num_experts n_routed_experts
experts moe text_config vision_config encoder decoder num_attention_heads n_head
attn_layer_period full_attn_idxs mamba_d_state ssm_cfg linear_attn_config
hybrid_override_pattern mlp_layer_types mlp_only_layers first_k_dense_replace
kv_lora_rank is_encoder_decoder num_hidden_layers attn_type_list auto_map thinker_config
layer_group_size use_mamba use_mla block_configs
"""
KEYS = st.sampled_from(KEY_NAMES.split()) | st.text(max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["mamba", "attention", "hybrid", "MM*-", "8", "-1", "1e9", "", "9" * 5000])
    | st.text(max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)


@settings(deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=8))
def test_no_config_makes_the_reader_raise(config: dict[str, Any]) -> None:
    facts = facts_from_config(config)
    assert isinstance(facts, ModelFacts)
    assert not (facts.is_hybrid and facts.is_attention_free)
    assert facts == facts_from_config(config)


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(GOLDEN))
def test_the_order_of_keys_does_not_change_the_facts(random: Any, entry: dict[str, Any]) -> None:
    items = list(entry["config"].items())
    random.shuffle(items)
    shuffled, plain = facts_from_config(dict(items)), facts_from_config(entry["config"])
    assert [getattr(shuffled, fact) for fact in FACTS] == [getattr(plain, fact) for fact in FACTS]
