"""The built-in policies against the rules of choice, and the host's capability check."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import runnerctl_hybrid_exclusion
import runnerctl_moe_allowlist
import runnerctl_pcp
import runnerctl_runner_v1
import runnerctl_runner_v2
from runnerctl import BUILTIN, EngineConfig, ModelFacts, PluginHost, RunnerSpec, Vote, hookimpl
from runnerctl.cli.render import decision_report, show
from runnerctl.config.engine_config import (
    ModelSection,
    Origin,
    ParallelSection,
    RunnerSection,
    SchedulerSection,
)
from runnerctl.config.read_facts import facts_from_config
from runnerctl.deciding import decide_config
from runnerctl.needs import needs_of
from runnerctl.runner.spec import CAPABILITIES

GOLDEN = json.loads((Path(__file__).parent / "data" / "model_facts.json").read_text())
# What runner_v2 votes, without the runner it provides: stand-ins have other capabilities.
VOTES = SimpleNamespace(select_runner=runnerctl_runner_v2.select_runner)
POLICIES = {
    "hybrid_exclusion": runnerctl_hybrid_exclusion,
    "moe_allowlist": runnerctl_moe_allowlist,
    "pcp": runnerctl_pcp,
    "runner_v2": VOTES,
}
EVERYTHING = frozenset(CAPABILITIES)
V1_TO_BE = EVERYTHING - {"pcp"}
V2_TO_BE = frozenset({"generate", "moe", "mla", "tp", "pcp"})


def standing_in(v1=EVERYTHING, v2=EVERYTHING):
    """The built-in policies over stand-in runners with these capabilities."""
    host = PluginHost()
    for name, module in POLICIES.items():
        host.register(module, name=name, distribution="runnerctl", version="0")
    specs = [RunnerSpec("v1", "m:V1", v1, fallback=True), RunnerSpec("v2", "m:V2", v2)]
    runners = SimpleNamespace(register_runners=hookimpl(lambda: specs))
    host.register(runners, name="stand_ins", distribution="runnerctl", version="0")
    assert host.problems == ()
    return host


def todays():
    """The built-in plugins with the runners they provide as things stand."""
    host = PluginHost()
    runners = {"runner_v1": runnerctl_runner_v1, "runner_v2": runnerctl_runner_v2}
    for name, module in (POLICIES | runners).items():
        host.register(module, name=name, distribution="runnerctl", version="0")
    assert host.problems == ()
    return host


def config(facts=None, *, runner=None, pcp=1, setting="--runner", options=None, budget=2048):
    return EngineConfig(
        model=ModelSection(model="m"),
        parallel=ParallelSection(prefill_context_parallel_size=pcp),
        scheduler=SchedulerSection(max_num_batched_tokens=budget),
        runner=RunnerSection(runner=runner or "auto"),
        facts=facts or ModelFacts(),
        plugin_options=options or {},
        origins={
            "runner": Origin("command line", setting),
            "prefill_context_parallel_size": Origin("file", "pcp (run.yaml)"),
        },
    )


def text_of(decision):
    return "\n".join(str(p) for p in decision.errors)


@pytest.mark.parametrize("entry", GOLDEN, ids=[e["architecture"] for e in GOLDEN])
def test_the_default_runner_of_every_known_architecture(entry):
    facts = facts_from_config(entry["config"])
    decision = decide_config(config(facts), standing_in())
    assert decision.runner == ("v2" if entry["default_v2"] else "v1")
    assert not decision.errors


# The truth table

DENSE = ModelFacts(architectures=("LlamaForCausalLM",))
LISTED = ModelFacts(architectures=("Qwen2MoeForCausalLM",), is_moe=True)
UNLISTED = ModelFacts(architectures=("MixtralForCausalLM",), is_moe=True)
HYBRID = ModelFacts(architectures=("BambaForCausalLM",), is_hybrid=True)
LISTED_HYBRID = ModelFacts(architectures=("Qwen2MoeForCausalLM",), is_moe=True, is_hybrid=True)
UNLISTED_HYBRID = ModelFacts(architectures=("JambaForCausalLM",), is_moe=True, is_hybrid=True)
ATTENTION_FREE = ModelFacts(architectures=("MambaForCausalLM",), is_attention_free=True)
LISTED_ATTENTION_FREE = ModelFacts(
    architectures=("GraniteMoeForCausalLM",), is_moe=True, is_attention_free=True
)
ENCODER_DECODER = ModelFacts(is_encoder_decoder=True)
POOLING = ModelFacts(architectures=("BertModel",), runner_type="pooling")
MODELS = {
    "dense": DENSE,
    "listed MoE": LISTED,
    "unlisted MoE": UNLISTED,
    "hybrid": HYBRID,
    "listed MoE hybrid": LISTED_HYBRID,
    "unlisted MoE hybrid": UNLISTED_HYBRID,
    "attention-free": ATTENTION_FREE,
    "listed MoE attention-free": LISTED_ATTENTION_FREE,
    "pooling": POOLING,
}
BY_DEFAULT_V2 = {"dense", "listed MoE"}
V2_CAN = BY_DEFAULT_V2 | {"unlisted MoE"}


def expected(explicit, pcp, kind):
    if explicit == "v1":
        return None if pcp else "v1"
    if explicit == "v2" or pcp:
        return "v2" if kind in V2_CAN else None
    return "v2" if kind in BY_DEFAULT_V2 else "v1"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("pcp", [False, True])
@pytest.mark.parametrize("explicit", [None, "v1", "v2"])
def test_truth_table(explicit, pcp, kind):
    wanted = config(MODELS[kind], runner=explicit, pcp=1 + pcp)
    decision = decide_config(wanted, standing_in(V1_TO_BE, V2_TO_BE))
    assert decision.runner == expected(explicit, pcp, kind)
    assert bool(decision.errors) == (decision.runner is None)


@pytest.mark.parametrize("v1", [V1_TO_BE, EVERYTHING])
def test_v1_with_pcp_names_the_setting_to_remove(v1):
    wanted = config(DENSE, runner="v1", pcp=2, setting="RUNNERCTL_RUNNER")
    decision = decide_config(wanted, standing_in(v1, V2_TO_BE))
    (error,) = decision.errors
    assert error.setting == "RUNNERCTL_RUNNER"
    assert "pcp requires v2" in error.message
    assert "remove RUNNERCTL_RUNNER" in error.remedy
    assert "set pcp (run.yaml) to 1" in error.remedy


def test_explicit_v2_lists_every_capability_it_lacks_at_once():
    facts = ModelFacts(
        is_hybrid=True,
        is_moe=True,
        is_multimodal=True,
        evidence={"is_hybrid": "layer_types=['mamba', 'attention']"},
    )
    decision = decide_config(config(facts, runner="v2"), standing_in(v2=V2_TO_BE))
    (error,) = decision.errors
    assert "hybrid (recurrent layers next to attention" in error.message
    assert "multimodal (images" in error.message
    assert "layer_types=['mamba', 'attention']" in error.message
    assert "moe" not in error.message


def test_pcp_with_a_model_v2_cannot_serve_names_both_sides():
    decision = decide_config(config(HYBRID, pcp=2), standing_in(V1_TO_BE, V2_TO_BE))
    assert "pcp requires v2" in text_of(decision)
    assert "the host forbids v2: it lacks hybrid" in text_of(decision)


def test_without_the_pcp_plugin_pcp_is_an_error_and_never_a_silent_v1():
    host = PluginHost()
    specs = [RunnerSpec("v1", "m:V1", V1_TO_BE, fallback=True)]
    runners = SimpleNamespace(register_runners=hookimpl(lambda: specs))
    host.register(runners, name="stand_ins")
    decision = decide_config(config(DENSE, pcp=4), host)
    assert decision.runner is None
    assert "the host forbids v1: it lacks pcp" in text_of(decision)
    assert "pcp (run.yaml) is 4" in text_of(decision)


def test_an_error_over_a_missing_capability_names_the_plugins_that_did_not_load():
    host = PluginHost.discover(plugins=["no:pcp"], allowed=())
    for runner in (None, "v1"):
        decision = decide_config(config(DENSE, runner=runner, pcp=2), host)
        assert decision.runner is None
        assert "pcp (blocked: -p no:pcp)" in text_of(decision)


# As things stand


@pytest.mark.parametrize(
    ("facts", "runner"), [(DENSE, "v2"), (LISTED, "v2"), (UNLISTED, "v1")], ids=str
)
def test_today_v2_serves_what_it_votes_for_and_v1_the_rest(facts, runner):
    decision = decide_config(config(facts), todays())
    assert decision.runner == runner
    assert decision.ok
    (vote,) = (b for b in decision.ballots if b.kind == "vote")
    assert vote.runner == "v2"
    assert vote.status == ("decisive" if runner == "v2" else "overridden")


@pytest.mark.parametrize("facts", [DENSE, UNLISTED], ids=["dense", "unlisted MoE"])
def test_today_v2_serves_any_of_them_when_it_is_asked_for(facts):
    assert decide_config(config(facts, runner="v2"), todays()).runner == "v2"


@pytest.mark.parametrize("facts", [DENSE, UNLISTED], ids=["dense", "unlisted MoE"])
def test_today_pcp_is_served_by_v2(facts):
    decision = decide_config(config(facts, pcp=2), todays())
    assert decision.runner == "v2"
    assert decision.ok
    assert "pcp" in decision.capabilities["v2"]
    assert "pcp" not in decision.capabilities["v1"]


def test_today_pcp_with_v1_names_the_setting_that_asked_for_v1():
    decision = decide_config(config(DENSE, runner="v1", pcp=2), todays())
    assert "--runner" in {e.setting for e in decision.errors}
    assert "remove --runner" in text_of(decision)


@pytest.mark.parametrize("facts", [HYBRID, ATTENTION_FREE])
def test_today_recurrent_models_run_on_v1_and_only_there(facts):
    assert decide_config(config(facts), todays()).runner == "v1"
    assert decide_config(config(facts, runner="v2"), todays()).runner is None


def test_today_what_v1_cannot_run_is_refused_by_name():
    decision = decide_config(config(ENCODER_DECODER), todays())
    assert decision.runner is None
    assert "the host forbids v1: it lacks encoder_decoder" in text_of(decision)


def test_today_pooling_models_are_served_by_v1_and_refused_on_v2_by_name():
    assert decide_config(config(POOLING), todays()).runner == "v1"
    decision = decide_config(config(POOLING, runner="v2"), todays())
    assert decision.runner is None
    assert "the host forbids v2: it lacks pooling" in text_of(decision)


def test_an_architecture_whose_code_goes_around_the_attention_interface_is_not_given_to_v2():
    pytest.importorskip("transformers")
    bloom = replace(DENSE, model_type="bloom", architectures=("BloomForCausalLM",))
    decision = decide_config(config(bloom), todays())
    assert decision.runner == "v1"
    (veto,) = [b for b in decision.ballots if b.kind == "forbid" and b.runner == "v2"]
    assert "bloom does not use its attention interface" in veto.reason
    llama = replace(DENSE, model_type="llama", architectures=("LlamaForCausalLM",))
    assert decide_config(config(llama), todays()).runner == "v2"


# Options, priorities, validation


def moe_options(**values):
    options, problems = standing_in().validated_options({"moe_allowlist": values})
    assert problems == ()
    return options


@pytest.mark.parametrize(
    ("values", "mixtral", "qwen"),
    [
        ({}, "v1", "v2"),
        ({"extend": ["MixtralForCausalLM"]}, "v2", "v2"),
        ({"extend": "MixtralForCausalLM, OlmoeForCausalLM"}, "v2", "v2"),
        ({"replace": ["MixtralForCausalLM"]}, "v2", "v1"),
        ({"replace": []}, "v1", "v1"),
        ({"replace": [], "extend": ["MixtralForCausalLM"]}, "v2", "v1"),
    ],
)
def test_the_moe_list_is_extended_or_replaced_by_configuration(values, mixtral, qwen):
    options = moe_options(**values)
    host = standing_in()
    assert decide_config(config(UNLISTED, options=options), host).runner == mixtral
    assert decide_config(config(LISTED, options=options), host).runner == qwen


def test_a_third_party_vote_overrides_every_built_in_policy():
    host = standing_in()
    host.register(SimpleNamespace(select_runner=hookimpl(lambda: Vote("v2", "r"))), name="acme")
    for facts in (UNLISTED, HYBRID, ATTENTION_FREE):
        assert decide_config(config(facts), host).runner == "v2"


def test_built_in_policies_speak_at_their_own_priority():
    spoken = standing_in().ballots(config(UNLISTED_HYBRID))[0]
    assert {b.priority for b in spoken} == {BUILTIN}
    assert len(spoken) == 3


def test_more_pcp_ranks_than_tokens_in_a_step_is_refused():
    wanted = config(DENSE, pcp=8, budget=4)
    decision = decide_config(wanted, standing_in(V1_TO_BE, V2_TO_BE))
    (error,) = decision.errors
    assert decision.runner == "v2"
    assert (error.plugin, error.setting) == ("pcp", "pcp (run.yaml)")


# Needs and the rest of a Decision


def test_needs_name_the_fact_or_setting_behind_them():
    facts = ModelFacts(is_moe=True, is_mla=True, evidence={"is_moe": "n_routed_experts=64"})
    wanted = config(facts, pcp=2)
    needs = {need.capability: need for need in needs_of(wanted)}
    assert set(needs) == {"generate", "moe", "mla", "pcp"}
    assert "n_routed_experts=64" in needs["moe"].reason
    assert needs["moe"].setting is None
    assert needs["pcp"].setting == "pcp (run.yaml)"


def test_every_need_the_host_can_have_is_a_documented_capability():
    flags = [name for name in ModelFacts.__dataclass_fields__ if name.startswith("is_")]
    facts = ModelFacts(**dict.fromkeys(flags, True))
    everything = config(facts, pcp=2).model_copy(
        update={
            "parallel": ParallelSection(tensor_parallel_size=2, prefill_context_parallel_size=2)
        }
    )
    needed = {need.capability for need in needs_of(everything)} | {"pooling", "unpaged"}
    assert needed == set(CAPABILITIES)


def test_the_hosts_own_veto_bears_the_name_of_the_plugin_that_provides_the_runner(capsys):
    decision = decide_config(config(HYBRID), standing_in(v2=V2_TO_BE))
    (veto,) = [b for b in decision.ballots if b.kind == "forbid"]
    assert (veto.plugin, veto.distribution, veto.runner) == ("stand_ins", "runnerctl", "v2")
    assert veto.by_host
    assert veto.reason.startswith("it lacks hybrid (")
    others = [b for b in decision.ballots if b is not veto]
    assert others
    assert not any(b.by_host for b in others)
    vote = next(b for b in others if b.kind == "vote")
    assert vote.overridden_by == "hybrid_exclusion, the host"
    show(decision_report(decision, "m"))
    shown = " ".join(capsys.readouterr().out.split())
    assert "The host forbids v2: It lacks hybrid" in shown  # in the sentence below the outcome
    assert "the host forbids v2 It lacks hybrid" in shown
    assert "v2 comes from stand_ins" in shown
    assert "stand_ins forbids" not in shown


def test_a_decision_reads_back_equal_and_says_what_runners_offer():
    decision = decide_config(config(UNLISTED), standing_in(v2=V2_TO_BE))
    assert type(decision).from_json(decision.to_json()) == decision
    assert decision.capabilities["v2"] == tuple(sorted(V2_TO_BE))
    assert [r.name for r in decision.plugins] == sorted([*POLICIES, "stand_ins"])


def test_doubts_about_the_model_are_shown_as_notes():
    facts = ModelFacts(uncertain=("model_type 'nova' is not known",))
    decision = decide_config(config(facts), standing_in())
    assert "model_type 'nova' is not known" in [
        p.message for p in decision.problems if p.severity == "note"
    ]


def test_a_model_that_could_not_be_read_is_an_error_and_no_plugin_is_asked():
    host = standing_in()
    asked = []
    spy = SimpleNamespace(select_runner=hookimpl(lambda: asked.append(1)))
    host.register(spy, name="spy")
    decision = decide_config(config().model_copy(update={"facts": None}), host)
    assert decision.runner is None
    assert decision.errors
    assert asked == []
