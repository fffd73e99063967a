"""From a model and settings to a Decision, through the library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import runnerctl
from runnerctl import Decision, EngineConfig, Forbid, PluginHost, RunnerSpec, Vote, hookimpl
from runnerctl.config.engine_config import ModelSection, RunnerSection
from runnerctl.resolve import resolve

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def decide(model, **settings) -> Decision:
    return runnerctl.decide(model, environ={}, **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


class TwoRunners:
    """Runners a and b; b is what it votes for."""

    @hookimpl
    def register_runners(self):
        return [
            RunnerSpec("a", "somewhere:A", fallback=True),
            RunnerSpec("b", "somewhere:B"),
        ]

    @hookimpl
    def select_runner(self, config):
        if config.scheduler.max_num_seqs == 1:
            return Forbid("b", "b needs company", "raise " + config.where("max_num_seqs"))
        return Vote("b", "b is better")


def two_runners() -> PluginHost:
    host = PluginHost()
    host.register(TwoRunners(), name="two")
    return host


@pytest.mark.parametrize("kind", ["folder", "path", "file", "mapping"])
def test_a_model_may_be_named_in_several_ways(kind, folder) -> None:
    model = {
        "folder": str(folder),
        "path": folder,
        "file": folder / "config.json",
        "mapping": LLAMA,
    }[kind]
    decision = decide(model)
    assert decision.ok, decision.problems
    assert decision.facts is not None
    assert decision.facts.max_position_embeddings == 128


def test_the_host_that_is_given_is_the_one_that_is_asked() -> None:
    decision = decide(LLAMA, host=two_runners())
    assert decision.runner == "b"
    assert [p.name for p in decision.plugins] == ["two"]


def test_a_plugin_names_the_setting_as_it_was_written() -> None:
    decision = decide(LLAMA, host=two_runners(), runner="b", max_num_seqs=1)
    (error,) = decision.errors
    assert error.setting == "runner="
    assert "raise max_num_seqs=" in error.remedy


def test_a_complete_configuration_is_taken_as_it_is(folder, monkeypatch) -> None:
    monkeypatch.setenv("RUNNERCTL_RUNNER", "b")
    config = EngineConfig(model=ModelSection(model=str(folder)), runner=RunnerSection(runner="a"))
    resolved = resolve(config, host=two_runners())
    assert resolved.decision.runner == "a"
    assert resolved.config is not None
    assert resolved.config.facts is not None
    assert resolved.config.facts.model_type == "llama"


def test_settings_next_to_a_complete_configuration_are_an_error(folder) -> None:
    decision = decide(EngineConfig(model=ModelSection(model=str(folder))), block_size=32)
    assert decision.runner is None
    assert decision.errors[0].setting == "block_size="


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"blok_size": 16}, "blok_size="),
        ({"block_size": "many"}, "block_size="),
        ({"plugin_options": {"moe_allowlist": {"extned": []}}}, "plugin_options="),
        ({"plugin_options": {"nobody": {"x": 1}}}, "plugin_options="),
        ({"config_file": "no-such.yaml"}, "config_file="),
        ({"plugins": ["nobody"]}, "plugins="),
        ({"runner": "v9"}, "runner="),
    ],
)
def test_a_mistake_is_a_problem_and_never_raises(settings, setting) -> None:
    decision = decide(LLAMA, **settings)
    assert not decision.ok
    assert setting in {p.setting for p in decision.errors}
    assert decision.plugins


def test_a_missing_model_is_reported_next_to_other_mistakes(tmp_path) -> None:
    decision = decide(tmp_path / "nowhere", block_size=0)
    assert decision.runner is None
    assert decision.facts is None
    assert len(decision.errors) == 2
    assert decision.plugins
    assert Decision.from_json(decision.to_json()) == decision


def test_a_length_beyond_the_context_is_an_error_and_one_within_is_not() -> None:
    (error,) = decide(LLAMA, max_model_len=129).errors
    assert error.setting == "max_model_len="
    assert "129" in error.message
    assert "128" in error.message
    assert decide(LLAMA, max_model_len=128).ok
    unbounded = {k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}
    assert decide(unbounded, max_model_len=10**6).ok


def test_fewer_tokens_than_requests_in_a_step_is_fine() -> None:
    assert (
        decide(LLAMA, max_num_batched_tokens=8, max_num_seqs=64).problems == decide(LLAMA).problems
    )


def test_options_reach_the_plugins() -> None:
    olmoe = {**LLAMA, "architectures": ["OlmoeForCausalLM"], "num_experts": 64}
    without = decide(olmoe)
    extended = decide(olmoe, plugin_options={"moe_allowlist": {"extend": ["OlmoeForCausalLM"]}})
    assert "moe_allowlist" in {b.plugin for b in without.ballots}
    assert "moe_allowlist" not in {b.plugin for b in extended.ballots}


def test_decide_stays_a_function_whatever_is_imported_first() -> None:
    script = (
        "import sys, runnerctl\n"
        "import runnerctl.resolve, runnerctl.deciding, runnerctl.decision, runnerctl.plugins\n"
        "decision = runnerctl.decide({'model_type': 'llama', 'num_attention_heads': 2})\n"
        "assert decision.runner == 'v2', decision\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
