"""Distributions that are really installed with pip, into an environment of their own.

The example under `examples/` changes decisions as its README says; broken plugins are
reported and cost nobody else anything.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PROJECTS = Path(__file__).parent / "plugin_projects"
EXAMPLE = REPOSITORY / "examples" / "vendor_policy"
ACME = {"ACME_VISIBLE_DEVICES": "0"}
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
MODELS = {
    "tested dense": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "other dense": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "tested MoE": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
    },
    "other MoE": {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": 64,
    },
}

pytestmark = pytest.mark.slow


class Environment:
    """A virtual environment with runnerctl, its base dependencies and a runner named v2."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        # a plain copy, so that building leaves nothing in the checkout
        self.pip_install(
            REPOSITORY, copy=("pyproject.toml", "README.md", "LICENSE", "core", "plugins")
        )
        for name, config in MODELS.items():
            model = folder / "models" / name
            model.mkdir(parents=True)
            (model / "config.json").write_text(json.dumps(config | SHAPE))

    def run(self, *command, env=None, check=True):
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("RUNNERCTL_", "VLLM_", "ACME_", "PYTHON"))
        }
        done = subprocess.run(
            [str(part) for part in command],
            env=clean | (env or {}),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not (check and done.returncode), done.stdout + done.stderr
        return done

    def pip_install(self, project, copy=None):
        source = self.folder / "projects" / project.name
        if copy:
            source.mkdir(parents=True)
            for name in copy:
                whole = shutil.copytree if (project / name).is_dir() else shutil.copy
                whole(project / name, source / name)
        else:
            shutil.copytree(project, source)
        self.run(self.bin / "python", "-m", "pip", "install", "-q", source)

    def pip_uninstall(self, distribution):
        self.run(self.bin / "python", "-m", "pip", "uninstall", "-q", "-y", distribution)
        shutil.rmtree(self.folder / "projects")

    def explain(self, model, *flags, env=None, check=True):
        path = self.folder / "models" / model
        command = [self.bin / "runnerctl", "explain", path, "--format", "json", *flags]
        return json.loads(self.run(*command, env=env, check=check).stdout)

    def outcomes(self, env=None):
        return {name: self.explain(name, env=env)["runner"] for name in MODELS}

    def plugins(self):
        listed = self.run(self.bin / "runnerctl", "plugins", "list", "--format", "json").stdout
        return {record["name"]: record for record in json.loads(listed)}


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("fresh"))


@pytest.fixture
def installed(environment, request):
    project, distribution = request.param
    environment.pip_install(project)
    yield environment
    environment.pip_uninstall(distribution)


WITHOUT_ACME = {
    "tested dense": "v2",
    "other dense": "v2",
    "tested MoE": "v1",
    "other MoE": "v1",
}


def test_a_vendors_policy_changes_decisions_while_it_is_installed(environment):
    assert environment.outcomes(ACME) == WITHOUT_ACME
    assert "acme" not in environment.plugins()

    environment.pip_install(EXAMPLE)
    try:
        record = environment.plugins()["acme"]
        assert (record["status"], record["hooks"]) == ("active", ["select_runner"])
        assert (record["distribution"], record["version"]) == ("acme-runner-policy", "1.0.0")
        assert environment.outcomes() == WITHOUT_ACME
        assert environment.outcomes(ACME) == {
            "tested dense": "v2",
            "other dense": "v1",
            "tested MoE": "v2",
            "other MoE": "v1",
        }
        ballots = environment.explain("tested MoE", env=ACME)["ballots"]
        fate = {b["plugin"]: (b["kind"], b["status"], b["overridden_by"]) for b in ballots}
        assert fate["acme"] == ("vote", "decisive", None)
        assert fate["moe_allowlist"] == ("discourage", "overridden", "acme")

        assert environment.explain("other dense", "--runner", "v2", env=ACME)["runner"] == "v2"
        assert environment.explain("other dense", "-p", "no:acme", env=ACME)["runner"] == "v2"
        nobody = ACME | {"RUNNERCTL_PLUGINS": ""}
        assert environment.explain("other dense", env=nobody)["runner"] == "v2"
    finally:
        environment.pip_uninstall("acme-runner-policy")

    assert environment.outcomes(ACME) == WITHOUT_ACME
    assert "acme" not in environment.plugins()


@pytest.mark.parametrize(
    "installed", [(PROJECTS / "import_error", "broken-import-error")], indirect=True
)
def test_an_installed_plugin_that_cannot_be_imported_is_listed_as_failed(installed):
    record = installed.plugins()["import_error"]
    assert record["status"] == "failed"
    assert "a_library_that_is_not_installed" in record["error"]

    decision = installed.explain("tested dense")
    assert decision["runner"] == "v2"
    (problem,) = [p for p in decision["problems"] if p["plugin"] == "import_error"]
    assert problem["severity"] == "warning"
    assert "broken-import-error 6.6.0" in problem["message"]
    assert "broken_import_error.py, line 3" in problem["message"]

    blocked = installed.explain("tested dense", "-p", "no:import_error")
    assert not [p for p in blocked["problems"] if p["plugin"]]
    strict = installed.explain("tested dense", "--strict-plugins", check=False)
    assert [p["severity"] for p in strict["problems"] if p["plugin"]] == ["error"]


@pytest.mark.parametrize(
    "installed", [(PROJECTS / "hook_error", "broken-hook-error")], indirect=True
)
def test_an_installed_plugin_that_raises_in_a_hook_loses_nobody_elses_vote(installed):
    assert installed.plugins()["hook_error"]["status"] == "active"
    decision = installed.explain("tested dense")
    assert decision["runner"] == "v2"
    assert "runner_v2" in [b["plugin"] for b in decision["ballots"]]
    (problem,) = [p for p in decision["problems"] if p["plugin"] == "hook_error"]
    for words in ("broken-hook-error 6.6.0", "'select_runner'", "no_such_fact", "veto"):
        assert words in problem["message"]
