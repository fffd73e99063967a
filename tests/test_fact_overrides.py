"""`register_model_facts`: what plugins say a model is, and what becomes of it."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnerctl import (
    Decision,
    Discourage,
    EngineConfig,
    FactOverrides,
    ModelFacts,
    PluginHost,
    RunnerSpec,
    hookimpl,
)
from runnerctl.cli.render import decision_report, show
from runnerctl.config.engine_config import ModelSection
from runnerctl.config.fact_overrides import FACT_NAMES, Supplied, merge_facts
from runnerctl.resolve import decide

DENSE = {
    "model_type": "tidal",
    "architectures": ["TidalForCausalLM"],
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "layers": {"kinds": ["tide", "anchor"]},
}


def knows(**facts):
    """A plugin that supplies these facts of every model."""
    reason = facts.pop("reason", "it says so")
    return SimpleNamespace(
        register_model_facts=hookimpl(lambda config_json: FactOverrides(reason, **facts))
    )


def answers(function):
    return SimpleNamespace(register_model_facts=hookimpl(function))


class Runners:
    """`all` can do everything, `dense` only generate; hybrids are better not on `dense`."""

    @hookimpl
    def register_runners(self):
        able = {"generate", "moe", "hybrid", "attention_free", "pooling", "mla"}
        return [
            RunnerSpec("all", "m:f", capabilities=able, fallback=True),
            RunnerSpec("dense", "m:f", capabilities={"generate"}),
        ]

    @hookimpl
    def select_runner(self, config):
        if config.facts.is_hybrid:
            return Discourage("dense", "hybrid")


def host_of(*plugins, strict=False, **named):
    host = PluginHost(strict=strict)
    host.register(Runners(), name="runners")
    for number, one in enumerate(plugins, 1):
        host.register(one, name=f"p{number}")
    for name, one in named.items():
        host.register(one, name=name, distribution=f"{name}-dist", version="1.0")
    return host


def decided(*plugins, model=DENSE, strict=False, **named):
    return decide(model, host=host_of(*plugins, strict=strict, **named), environ={})


def test_a_plugin_knows_better_than_the_config():
    decision = decided(tidal=knows(is_hybrid=True, num_hidden_layers=12, reason="it has tides"))
    facts = decision.facts
    assert (facts.is_hybrid, facts.is_moe, facts.num_hidden_layers) == (True, False, 12)
    assert facts.max_position_embeddings == 512
    assert facts.supplied_by == {"is_hybrid": "tidal", "num_hidden_layers": "tidal"}
    assert facts.evidence["is_hybrid"] == "tidal says: it has tides"
    need = next(n for n in decision.needs if n.capability == "hybrid")
    assert need.reason == "tidal says: it has tides"
    # policies and the capability check saw it
    assert {b.kind for b in decision.ballots if b.runner == "dense"} == {"discourage", "forbid"}
    assert Decision.from_json(decision.to_json()) == decision


def test_a_fact_that_was_read_can_be_taken_back():
    moe = DENSE | {"num_experts": 8}
    assert decided(model=moe).facts.is_moe
    facts = decided(model=moe, p=knows(is_moe=False, reason="a crew is no expert")).facts
    assert not facts.is_moe
    assert facts.evidence["is_moe"] == "p says: a crew is no expert"
    assert decided(p=knows(max_position_embeddings=None)).facts.max_position_embeddings is None


def test_what_the_host_read_as_well_keeps_the_hosts_evidence():
    moe = DENSE | {"num_experts": 8}
    facts = decided(model=moe, p=knows(is_moe=True)).facts
    assert facts.evidence["is_moe"] == "num_experts = 8"
    assert facts.supplied_by == {}


def test_a_doubt_is_told_unless_a_plugin_knows():
    odd = {k: v for k, v in DENSE.items() if k != "num_attention_heads"}
    assert len(decided(model=odd).facts.uncertain) == 1
    assert decided(model=odd, p=knows(is_hybrid=True)).facts.uncertain == ()
    assert decided(model=odd, p=knows(is_attention_free=False)).facts.uncertain == ()
    assert len(decided(model=odd, p=knows(is_moe=True)).facts.uncertain) == 1
    unnamed = {k: v for k, v in DENSE.items() if k != "architectures"}
    assert len(decided(model=unnamed).facts.uncertain) == 1
    assert decided(model=unnamed, p=knows(runner_type="generate")).facts.uncertain == ()


def test_hybrid_and_attention_free_exclude_each_other():
    mamba = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 16}
    assert decided(model=mamba).facts.is_attention_free
    facts = decided(model=mamba, p=knows(is_hybrid=True)).facts
    assert (facts.is_hybrid, facts.is_attention_free) == (True, False)
    decision = decided(a=knows(is_hybrid=True), b=knows(is_attention_free=True))
    assert decision.runner is None
    assert len(decision.errors) == 2  # one about each of the two facts


def test_plugins_that_contradict_each_other_are_an_error_naming_both_and_the_way_out():
    plugins = {
        "acme": knows(is_moe=True, reason="it has crews"),
        "zeta": knows(is_moe=False, reason="crews are no experts"),
    }
    decision = decided(**plugins)
    assert decision.runner is None
    (error,) = decision.errors
    for words in ("is_moe", "acme says it is True (it has crews)", "zeta says it is False"):
        assert words in error.message
    assert "pass -p no:acme to take False" in error.remedy
    assert "pass -p no:zeta to take True" in error.remedy
    assert not decision.facts.is_moe
    # and the way out is one
    assert decided(acme=plugins["acme"]).ok


def test_a_plugin_that_contradicts_itself_can_only_be_blocked():
    def both():
        return [FactOverrides("a", is_moe=True), FactOverrides("b", is_moe=False)]

    (error,) = decided(tidal=answers(both)).errors
    assert "update the plugin, or block it with -p no:tidal" in error.remedy


def test_plugins_that_agree_are_named_together():
    decision = decided(zeta=knows(is_moe=True, reason="b"), acme=knows(is_moe=True, reason="a"))
    assert decision.facts.supplied_by["is_moe"] == "acme, zeta"
    assert decision.facts.evidence["is_moe"] == "acme, zeta says: a; b"


def test_each_plugin_gets_a_copy_of_its_own():
    seen = []

    def spoils(config_json):
        seen.append(config_json["layers"]["kinds"])
        config_json["layers"]["kinds"].append("mamba")
        config_json["num_experts"] = 8

    model = DENSE | {"layers": {"kinds": ("tide",)}}
    decision = decided(answers(spoils), answers(spoils), model=model)
    assert decision.ok
    assert seen == [["tide", "mamba"], ["tide", "mamba"]]
    assert model["layers"] == {"kinds": ("tide",)}
    assert not decision.facts.is_moe
    assert not decision.facts.is_hybrid


def test_it_is_asked_once_for_a_decision_and_not_about_given_facts():
    asked = []
    host = host_of(answers(lambda: asked.append(1)))
    decide(DENSE, host=host, environ={})
    assert len(asked) == 1
    given = EngineConfig(model=ModelSection(model="m"), facts=ModelFacts())
    decide(given, host=host, environ={})
    assert len(asked) == 1


def test_it_is_asked_about_an_engine_config_without_facts(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "tidal", "num_attention_heads": 2}')
    config = EngineConfig(model=ModelSection(model=str(tmp_path)))
    decision = decide(config, host=host_of(tidal=knows(is_hybrid=True)), environ={})
    assert decision.facts.supplied_by["is_hybrid"] == "tidal"


def test_a_plugin_goes_before_the_files_beside_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "tidal", "num_attention_heads": 2}')
    (tmp_path / "modules.json").write_text("[]")
    assert decided(model=tmp_path).facts.runner_type == "pooling"
    assert decided(model=tmp_path, p=knows(runner_type="generate")).facts.runner_type == "generate"


def test_explain_shows_each_fact_that_changed(capsys):
    plugin = knows(is_moe=True, num_hidden_layers=12, reason="it has crews")
    show(decision_report(decided(tidal=plugin, model=DENSE), "m"))
    shown = " ".join(capsys.readouterr().out.split())
    assert "tidal says: it has crews (is_moe = True, num_hidden_layers = 12)." in shown


# faults


def raises():
    raise KeyError("stream")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, "KeyError: 'stream'"),
        (lambda: {"is_moe": True}, "must return FactOverrides, not dict"),
        (lambda: [{"is_moe": True}], "must give FactOverrides, not dict"),
        (lambda: True, "must return FactOverrides, not bool"),
        (lambda: FactOverrides("r", is_hybird=True), "is_hybird"),
        (lambda: FactOverrides("r", is_moe=1), "is_moe must be true or false, not 1"),
        (lambda: FactOverrides("r", is_moe=None), "is_moe must be true or false, not None"),
        (lambda: FactOverrides("r", runner_type="embed"), "must be generate or pooling"),
        (lambda: FactOverrides("r", num_hidden_layers=True), "above 0, or None, not True"),
        (lambda: FactOverrides("r", num_hidden_layers=0), "above 0, or None, not 0"),
        (lambda: FactOverrides("r", max_position_embeddings="8k"), "above 0, or None, not '8k'"),
        (lambda: FactOverrides("r"), "without a fact"),
        (lambda: FactOverrides(" ", is_moe=True), "needs a reason"),
        (lambda: FactOverrides("r", is_hybrid=True, is_attention_free=True), "at once"),
    ],
)
def test_a_wrong_answer_is_a_fault_of_its_plugin_and_costs_nobody_elses_facts(function, words):
    decision = decided(bad=answers(function), good=knows(is_moe=True))
    assert decision.runner == "all"
    assert decision.facts.supplied_by == {"is_moe": "good"}
    (problem,) = decision.problems
    assert (problem.severity, problem.plugin) == ("warning", "bad")
    for part in ("bad-dist 1.0", "'register_model_facts'", words):
        assert part in problem.message
    assert "-p no:bad" in problem.remedy
    strict = decided(strict=True, bad=answers(function))
    assert [p.severity for p in strict.problems] == ["error"]


def test_what_a_plugin_said_before_its_fault_counts():
    def half():
        yield FactOverrides("r", is_moe=True)
        raise RuntimeError("later")

    assert decided(p=answers(half)).facts.is_moe


# for all inputs

VALUES = {
    "runner_type": st.sampled_from(["generate", "pooling"]),
    "num_hidden_layers": st.sampled_from([None, 1, 2]),
    "num_attention_heads": st.sampled_from([None, 1, 2]),
    "num_key_value_heads": st.sampled_from([None, 1, 2]),
    "max_position_embeddings": st.sampled_from([None, 1, 2]),
}
OVERRIDES = (
    st.fixed_dictionaries({}, optional={n: VALUES.get(n, st.booleans()) for n in FACT_NAMES})
    .filter(lambda f: f and not (f.get("is_hybrid") and f.get("is_attention_free")))
    .flatmap(lambda f: st.sampled_from("ab").map(lambda reason: FactOverrides(reason, **f)))
)
SUPPLIED = st.builds(Supplied, st.sampled_from(["p", "q", "r"]), OVERRIDES)


@given(st.lists(SUPPLIED, max_size=3), st.booleans())
def test_the_order_of_plugins_never_matters(supplied, is_hybrid):
    read = ModelFacts(is_hybrid=is_hybrid, is_attention_free=not is_hybrid)
    outcomes = [merge_facts(read, order) for order in itertools.permutations(supplied)]
    facts, problems = outcomes[0]
    for others, other_problems in outcomes[1:]:
        assert others == facts
        assert [p.severity for p in other_problems] == [p.severity for p in problems]
    for name in FACT_NAMES:
        said = {one.overrides.facts()[name] for one in supplied if name in one.overrides.facts()}
        expected = said.pop() if len(said) == 1 else getattr(read, name)
        assert getattr(facts, name) == expected
        assert (name in facts.supplied_by) == (expected != getattr(read, name))
    if not problems:
        assert not (facts.is_hybrid and facts.is_attention_free)
