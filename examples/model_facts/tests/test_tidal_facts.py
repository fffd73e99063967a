"""What a Tidal config means, and that nobody else's is touched."""

import tidal_facts

from runnerctl.testing import CONFIGURATIONS, Configuration, PolicyConformance

TIDAL = {
    "model_type": "tidal",
    "architectures": ["TidalForCausalLM"],
    "stream": "~~~o~~~o",
    "anchors": 16,
    "crew": 8,
    "reach": 65536,
}


ASKED = {
    **CONFIGURATIONS,
    "tidal": Configuration(TIDAL),
    "tidal without words": Configuration({"model_type": "tidal"}),
    "tidal of odd words": Configuration(TIDAL | {"stream": 3, "crew": None, "reach": "far"}),
}


class TestTidal(PolicyConformance):
    plugin = tidal_facts
    configurations = ASKED


def facts(decide_with, **changes):
    return decide_with(tidal_facts, model=TIDAL | changes).facts


def test_tides_and_anchors_make_a_hybrid(decide_with):
    found = facts(decide_with)
    assert (found.is_hybrid, found.is_attention_free, found.is_moe) == (True, False, True)
    assert (found.num_hidden_layers, found.max_position_embeddings) == (8, 65536)
    assert found.uncertain == ()
    assert set(found.supplied_by.values()) == {"tidal_facts"}


def test_tides_alone_need_no_attention(decide_with):
    found = facts(decide_with, stream="~~~~")
    assert (found.is_hybrid, found.is_attention_free) == (False, True)
    assert found.max_position_embeddings is None


def test_anchors_alone_are_a_dense_model(decide_with):
    found = facts(decide_with, stream="oooo", crew=1)
    assert (found.is_hybrid, found.is_attention_free, found.is_moe) == (False, False, False)
    assert found.uncertain == ()


def test_odd_configs_and_other_models_are_left_alone(decide_with):
    for changes in ({"stream": "~~??"}, {"stream": None}, {"stream": []}, {"model_type": "llama"}):
        decision = decide_with(tidal_facts, model=TIDAL | changes)
        assert not decision.facts.supplied_by
        assert not any(problem.plugin for problem in decision.problems)
