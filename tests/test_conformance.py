"""Our own plugins pass the conformance classes, and the kit's fixtures do what they say."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import runnerctl_hybrid_exclusion
import runnerctl_moe_allowlist
import runnerctl_pcp
import runnerctl_runner_v1
import runnerctl_runner_v2
from runnerctl import Discourage, ModelFacts, RunnerSpec, Vote, hookimpl
from runnerctl.testing import CONFIGURATIONS, PolicyConformance, RunnerConformance
from runnerctl.testing.configurations import MOE

OPTIONS = {"extend": ("MixtralForCausalLM",)}


class TestHybridExclusion(PolicyConformance):
    plugin = runnerctl_hybrid_exclusion


class TestMoeAllowlist(PolicyConformance):
    plugin = runnerctl_moe_allowlist


class TestMoeAllowlistWithOptions(PolicyConformance):
    plugin = runnerctl_moe_allowlist
    plugin_options = OPTIONS


class TestPcp(PolicyConformance):
    plugin = runnerctl_pcp


class TestRunnerV1(PolicyConformance):
    plugin = runnerctl_runner_v1


class TestRunnerV2(PolicyConformance):
    plugin = runnerctl_runner_v2


(V1,) = runnerctl_runner_v1.register_runners()


class TestModelRunnerV1(RunnerConformance):
    spec = V1


(V2,) = runnerctl_runner_v2.register_runners()


class TestModelRunnerV2(RunnerConformance):
    """With its own kernels, packed and compiled, where a C++ compiler is found."""

    spec = V2
    plugins = (runnerctl_runner_v2,)


class TestModelRunnerV1WithOtherTraits(RunnerConformance):
    """V1 happens to serve these plans too: the kit asks nothing that only V1 does."""

    spec = replace(V1, resumes_as_new=True, concurrent_batches=3, capabilities={"generate"})


# The table of configurations


FACTS = {
    "mixture of experts": {"is_moe"},
    "multi-head latent attention": {"is_moe", "is_mla"},
    "hybrid": {"is_hybrid", "is_moe"},
    "attention-free": {"is_attention_free"},
    "encoder-decoder": {"is_encoder_decoder"},
    "multimodal": {"is_multimodal"},
    "tensor parallel": {"is_moe"},
    "explicit v2": {"is_moe"},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_configuration_is_what_its_name_says(plugin_host, name):
    facts = CONFIGURATIONS[name].resolved(plugin_host).facts
    flags = {flag for flag in ModelFacts.__dataclass_fields__ if flag.startswith("is_")}
    assert {flag for flag in flags if getattr(facts, flag)} == FACTS.get(name, set())
    assert facts.runner_type == ("pooling" if name == "pooling" else "generate")


# The fixtures


class PrefersV2:
    @hookimpl
    def select_runner(self, config):
        return Vote("v2", "it is faster") if not config.facts.is_moe else None


class AgainstV2:
    @hookimpl
    def select_runner(self):
        return Discourage("v2", "measured slower here")


def test_plugin_host_knows_no_plugin(plugin_host):
    assert plugin_host.records == ()


def test_installed_host_has_the_built_in_plugins(installed_host):
    assert {"runner_v1", "moe_allowlist"} <= {record.name for record in installed_host.records}


def test_decide_with_asks_these_plugins_and_no_others(decide_with):
    decision = decide_with(PrefersV2())
    assert decision.runner == "v2"
    assert [ballot.plugin for ballot in decision.ballots] == ["prefersv2"]
    assert decide_with(PrefersV2(), AgainstV2()).runner == "v1"
    assert decide_with().runner == "v1"


def test_decide_with_takes_a_config_json_or_facts_and_settings(decide_with):
    assert decide_with(PrefersV2(), model=MOE).runner == "v1"
    assert decide_with(PrefersV2(), model=ModelFacts(is_moe=True)).runner == "v1"
    assert decide_with(PrefersV2(), model=ModelFacts()).runner == "v2"
    assert decide_with(PrefersV2(), model=ModelFacts(), runner="v1").runner == "v1"
    decision = decide_with(
        runnerctl_moe_allowlist,
        PrefersV2(),
        model=MOE,
        runner="v2",
        plugin_options={"runnerctl_moe_allowlist": {"extend": ["MixtralForCausalLM"]}},
    )
    assert decision.ballots == ()


def test_decide_with_lets_the_environment_and_other_runners_out(decide_with, monkeypatch):
    monkeypatch.setenv("RUNNERCTL_RUNNER", "v2")
    assert decide_with().explicit is None
    only = RunnerSpec("slow", "m:R", fallback=True)
    decision = decide_with(PrefersV2(), runners=[only])
    assert decision.runner == "slow"
    assert set(decision.capabilities) == {"slow"}


def test_stand_ins_leave_the_place_to_runners_that_the_plugins_bring(decide_with):
    decision = decide_with(runnerctl_runner_v1, model=MOE)
    assert decision.runner == "v1"
    assert "unpaged" in decision.capabilities["v1"]
    assert "pcp" not in decision.capabilities["v1"]
    assert "hybrid" in decision.capabilities["v2"]


def test_tiny_models_are_made_once(tiny_models, tiny_model):
    assert tiny_models("llama") == tiny_model
    assert json.loads((tiny_model / "config.json").read_text())["model_type"] == "llama"
    assert tiny_models("mixtral") != tiny_model


def test_the_pytest_plugin_acts_only_when_asked():
    """A project that merely has runnerctl installed gets fixtures, and pays next to nothing."""
    code = (
        "import pytest, sys; before = set(sys.modules);"
        "import runnerctl.testing.pytest_plugin as plugin; new = set(sys.modules) - before;"
        "print(len([n for n in new if not n.startswith('runnerctl')]),"
        "[n for n in vars(plugin) if n.startswith('pytest_')],"
        "sorted(n for n in new if n.startswith('runnerctl')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split(maxsplit=1) == [
        "0",
        "[] ['runnerctl', 'runnerctl.testing', 'runnerctl.testing.pytest_plugin']\n",
    ]


def test_the_tests_that_the_guide_shows_pass(tmp_path):
    page = Path(__file__).parent.parent / "docs" / "testing.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for i, block in enumerate(blocks):
        (tmp_path / f"test_block_{i}.py").write_text(block)
    # of V1 one test is enough here: it passes all of them above
    chosen = ["-k", "not TestRunner or test_a_batch"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert len(blocks) == 5
