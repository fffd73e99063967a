"""Each example does what its README says, really installed, and is gone once uninstalled.

One fresh virtual environment for all of them, which sees the packages of this one, so
that nobody downloads torch; runnerctl itself is that of this checkout.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tiny_models import make_tiny_model

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))
SOURCES = [ROOT / "core", *sorted((ROOT / "plugins").iterdir())]


class Environment:
    """A virtual environment on top of the one that runs the tests."""

    def __init__(self, folder):
        self.folder = folder
        self.python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        self.call(sys.executable, "-m", "venv", folder / "venv")
        (purelib,) = self.python_says("import sysconfig; print(sysconfig.get_path('purelib'))")
        self.site_packages = Path(purelib)
        below = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [f"import site; site.addsitedir({path!r})\n" for path in sorted(below)]
        (self.site_packages / "below.pth").write_text("".join(lines))
        self.own_files = self.files()

    def call(self, *command, status=0):
        kept = ("RUNNERCTL_", "VLLM_", "PYTEST_", "PIP_TARGET")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(kept)}
        clean |= {
            "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }
        words = [str(word) for word in command]
        done = subprocess.run(
            words, env=clean, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert status in (None, done.returncode), done.stdout + done.stderr
        return done

    def python_says(self, code):
        return self.call(self.python, "-c", code).stdout.splitlines()

    def runnerctl(self, *arguments, status=0):
        return self.call(self.python, "-m", "runnerctl", *arguments, status=status)

    def explain(self, model, *arguments, status=0):
        command = ("explain", model, "--format", "json", *arguments)
        return json.loads(self.runnerctl(*command, status=status).stdout)

    def plugins(self):
        records = json.loads(self.runnerctl("plugins", "list", "--format", "json").stdout)
        return {record["name"]: record for record in records}

    def pip(self, *arguments):
        return self.call(self.python, "-m", "pip", "--disable-pip-version-check", *arguments)

    def install(self, example):
        copy = self.folder / "projects" / example
        # a copy, so that building leaves nothing in the checkout
        shutil.copytree(ROOT / "examples" / example, copy, dirs_exist_ok=True)
        # what it needs is here already
        self.pip("install", "--quiet", "--no-deps", copy)

    def uninstall(self, example):
        self.pip("uninstall", "--quiet", "--yes", project(example)["name"])

    def run_its_tests(self, example):
        tests = self.folder / "projects" / example / "tests"
        self.call(self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)

    def files(self):
        return {path for path in self.site_packages.iterdir() if path.name != "__pycache__"}


def project(example):
    return tomllib.loads((ROOT / "examples" / example / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def installed(environment, request):
    (name,) = project(request.param)["entry-points"]["runnerctl.plugins"]
    assert name not in environment.plugins()
    environment.install(request.param)
    try:
        record = environment.plugins()[name]
        assert (record["status"], record["error"]) == ("active", "")
        assert record["distribution"] == project(request.param)["name"]
        yield environment
    finally:
        environment.uninstall(request.param)
    assert name not in environment.plugins()
    assert environment.files() == environment.own_files


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_whole_distribution(example):
    described = project(example.name)
    readme = (example / described["readme"]).read_text()
    assert f"pip uninstall {described['name']}" in readme
    assert any(need.startswith("runnerctl") for need in described["dependencies"])
    assert described["entry-points"]["runnerctl.plugins"]
    for module in described["entry-points"]["runnerctl.plugins"].values():
        assert (example / f"{module}.py").exists() or (example / module / "__init__.py").exists()


@pytest.mark.parametrize("installed", ["site_policy"], indirect=True)
@pytest.mark.slow
def test_the_site_policy_does_what_its_options_say(installed, llama):
    def option(text):
        return ("--plugin-option", f"site.{text}")

    def of_site(decision):
        return [b for b in decision["ballots"] if b["plugin"] == "site"]

    assert not of_site(installed.explain(llama))

    pinned = installed.explain(llama, *option("pins=LlamaForCausalLM=v1"))
    assert [(b["runner"], b["status"]) for b in of_site(pinned)] == [("v1", "decisive")]
    other = installed.explain(llama, *option("pins=OPTForCausalLM=v1"))
    assert not of_site(other)

    wish = ("--runner", "v1")
    forbidden = installed.explain(llama, *option("unreleased=v1"), *wish, status=2)
    assert any("not released at this site" in p["message"] for p in forbidden["problems"])

    too_many = installed.explain(llama, *option("max_num_seqs=8"), "--max-num-seqs", "9", status=2)
    (error,) = [p for p in too_many["problems"] if p["severity"] == "error"]
    assert error["message"] == "--max-num-seqs is 9, and this site allows 8 requests at once"
    assert (error["setting"], error["plugin"]) == ("--max-num-seqs", "site")
    installed.explain(llama, *option("max_num_seqs=8"), "--max-num-seqs", "8")

    unheeded = installed.explain(llama, *option("pins=LlamaForCausalLM=nowhere"))
    assert any(
        "is pinned to nowhere, but v2 serves it" in p["message"] for p in unheeded["problems"]
    )

    for wrong in ("pins=LlamaForCausalLM", "pin=a=b", "max_num_seqs=0"):
        assert installed.explain(llama, *option(wrong), status=2)["runner"] is None
    installed.run_its_tests("site_policy")


TIDAL = {
    "model_type": "tidal",
    "architectures": ["TidalForCausalLM"],
    "stream": "~~~o~~~o",
    "anchors": 16,
    "crew": 8,
    "reach": 65536,
}


@pytest.mark.parametrize("installed", ["model_facts"], indirect=True)
@pytest.mark.slow
def test_model_facts_tell_the_host_what_it_cannot_read(installed):
    model = installed.folder / "tidal.json"
    model.write_text(json.dumps(TIDAL))

    def facts(*arguments):
        # the outcome depends on what the runners can do; the facts do not
        command = ("explain", model, "--runner", "auto", "--format", "json", *arguments)
        decision = json.loads(installed.runnerctl(*command, status=None).stdout)
        named = ("is_hybrid", "is_moe", "num_hidden_layers", "max_position_embeddings")
        return decision, [decision["facts"][name] for name in named]

    decision, found = facts()
    assert found == [True, True, 8, 65536]
    assert decision["facts"]["supplied_by"]["is_hybrid"] == "tidal"
    against = {(b["plugin"], b["runner"]) for b in decision["ballots"] if b["kind"] == "discourage"}
    assert ("hybrid_exclusion", "v2") in against
    assert {"hybrid", "moe"} <= {need["capability"] for need in decision["needs"]}
    assert decision["runner"] != "v2"
    shown = installed.runnerctl("explain", model, status=None).stdout
    assert "tidal says: its stream has 6 tides" in shown

    without, found = facts("-p", "no:tidal")
    assert found[:2] == [False, False]
    assert without["runner"] == "v2"
    assert without["facts"]["uncertain"]
    installed.run_its_tests("model_facts")


ANSWERS = """
import json, sys
from runnerctl import LLM, SamplingParams

prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [4] * 6]
params = [
    SamplingParams(temperature=0, max_tokens=9, min_tokens=5, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=3, max_tokens=9, top_p=0.9, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(
        temperature=0, max_tokens=9, n=2, repetition_penalty=1.3, logit_bias={9: 2.0},
        bad_words_token_ids=((4,), (9, 9)),
    ),
]
found = {}
for runner in ("v1", "reference"):
    with LLM(sys.argv[1], runner=runner, dtype="float32", max_num_batched_tokens=4) as llm:
        found[runner] = [
            {
                "tokens": [list(answer.token_ids) for answer in output.outputs],
                "logprobs": [
                    [(t, l.logprob, l.rank) for t, l in entry.items()]
                    for entry in (*(output.outputs[0].logprobs or ()),
                                  *(output.prompt_logprobs or (None,))[1:])
                ],
            }
            for output in llm.generate(prompts, params)
        ]
print(json.dumps(found))
"""


@pytest.mark.parametrize("installed", ["reference_runner"], indirect=True)
@pytest.mark.slow
def test_the_reference_runner_executes_models_and_is_taken_only_by_name(installed, llama):
    assert installed.explain(llama)["runner"] == "v2"
    without = ("-p", "no:runner_v1", "-p", "no:runner_v2")
    assert installed.explain(llama, *without, status=2)["runner"] is None
    assert installed.explain(llama, "--runner", "reference")["runner"] == "reference"

    found = json.loads(installed.call(installed.python, "-c", ANSWERS, llama).stdout)
    for ours, theirs in zip(found["reference"], found["v1"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert len(ours["logprobs"]) == len(theirs["logprobs"])
        for one, other in zip(ours["logprobs"], theirs["logprobs"], strict=True):
            assert [token for token, _, _ in one] == [token for token, _, _ in other]
            assert [rank for _, _, rank in one] == [rank for _, _, rank in other]
            expected = pytest.approx([value for _, value, _ in other], abs=1e-3)
            assert [value for _, value, _ in one] == expected
    assert found["reference"][0]["logprobs"]
    installed.run_its_tests("reference_runner")


def test_the_reference_runner_decodes_by_itself():
    for path in (ROOT / "examples" / "reference_runner").glob("**/*.py"):
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert "generate" not in names
        assert "past_key_values" not in path.read_text()
        assert "Cache(" not in path.read_text()


@pytest.mark.parametrize("installed", ["journal_command"], indirect=True)
@pytest.mark.slow
def test_the_journal_command_sums_up_what_was_logged(installed, llama):
    log = installed.folder / "log.jsonl"
    installed.explain(llama, "--log-json", log)
    code = "LLM(sys.argv[1], log_json=sys.argv[2]).generate([5, 6, 7])"
    imports = "import sys; from runnerctl import LLM; "
    installed.call(installed.python, "-c", imports + code, llama, log)
    summed = installed.runnerctl("journal", log).stdout
    assert re.search(r"^decisions +2 v2$", summed, re.MULTILINE)
    assert re.search(r"^requests +1: 1 (stop|length)$", summed, re.MULTILINE)
    assert re.search(r"^prompt tokens +3$", summed, re.MULTILINE)

    assert "Sum up a FILE" in installed.runnerctl("--help").stdout
    assert "cannot read" in installed.runnerctl("journal", "nowhere", status=2).stderr
    installed.runnerctl("-p", "no:journal", "journal", log, status=2)
    installed.run_its_tests("journal_command")
