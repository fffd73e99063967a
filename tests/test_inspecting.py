"""`env`, `config show`, `plugins options`, and `explain` as a flowchart and as a comparison."""

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from runnerctl.cli import env, env_probes
from runnerctl.cli.app import app
from runnerctl.cli.config import as_yaml, read_config
from runnerctl.cli.mermaid import flowchart
from runnerctl.config.engine_config import SETTINGS
from runnerctl.decision import CountedBallot, Decision, ExplicitChoice
from runnerctl.problems import Problem

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_attention_heads": 4,
    "num_local_experts": 8,
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("RUNNERCTL_", "VLLM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for name, config in (("llama.json", LLAMA), ("moe.json", MIXTRAL)):
        (tmp_path / name).write_text(json.dumps(config))


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result


# config show


def shown(*arguments):
    return json.loads(run("config", "show", *arguments, "--format", "json").stdout)


def test_every_setting_is_shown_with_its_source(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(
        "block-size: 32\nplugin_options: {moe_allowlist: {extend: [A]}}\n"
    )
    monkeypatch.setenv("RUNNERCTL_MAX_NUM_SEQS", "7")
    found = shown("llama.json", "--config", "run.yaml", "--runner", "v1")
    assert set(found["settings"]) == set(SETTINGS)
    sources = {name: (item["value"], item["source"]) for name, item in found["settings"].items()}
    assert sources["model"] == ("llama.json", "command line")
    assert sources["runner"] == ("v1", "command line")
    assert sources["block_size"] == (32, "file")
    assert sources["max_num_seqs"] == (7, "environment")
    assert sources["dtype"] == ("auto", "default")
    options = found["plugin_options"]["moe_allowlist"]
    assert options["extend"]["value"] == ["A"]
    assert options["extend"]["setting"] == "plugin_options.moe_allowlist.extend in run.yaml"
    assert options["replace"]["source"] == "default"


def test_the_table_names_where_a_value_was_made(monkeypatch):
    monkeypatch.setenv("RUNNERCTL_BLOCK_SIZE", "8")
    output = run("config", "show", "--no-enable-prefix-caching").stdout
    assert re.search(r"^block_size +8 +RUNNERCTL_BLOCK_SIZE$", output, re.MULTILINE)
    assert re.search(r"^enable_prefix_caching +off +--no-enable-prefix-caching$", output, re.M)
    assert re.search(r"^max_num_seqs +64 +default$", output, re.MULTILINE)


AWKWARD = [
    (),
    ("--plugin-option", "moe_allowlist.extend=[A, 'b: c', '# d', \"e'f\", 'null', 'é🎉']"),
    ("--plugin-option", "moe_allowlist.replace=[]", "-p", "no:pcp", "--allowed-plugins", ""),
    ("--kv-cache-memory-bytes", "2GiB", "--enforce-eager", "--runner", "on"),
    ("--attention-backend", "y: [x", "--runner", "'", "--dtype", "float16"),
]


@pytest.mark.parametrize("flags", AWKWARD)
@pytest.mark.parametrize("model", [(), ("a model: #1",)])
def test_the_yaml_gives_the_same_configuration_when_fed_back(flags, model, tmp_path):
    text = run("config", "show", *model, *flags, "--format", "yaml").stdout
    (tmp_path / "again.yaml").write_text(text, encoding="utf-8")
    first, again = shown(*model, *flags), shown("--config", "again.yaml")

    def values(found):
        options = found["plugin_options"]
        return (
            {name: item["value"] for name, item in found["settings"].items()},
            {p: {key: item["value"] for key, item in options[p].items()} for p in options},
        )

    assert values(first) == values(again)
    assert {"block_size", "plugin_options"} <= set(yaml.safe_load(text))


def test_the_yaml_beats_variables_with_what_it_says(tmp_path, monkeypatch):
    (tmp_path / "again.yaml").write_text(as_yaml(read_config({}, None, {})))
    monkeypatch.setenv("RUNNERCTL_BLOCK_SIZE", "8")
    assert shown("--config", "again.yaml")["settings"]["block_size"]["value"] == 16


def test_a_wrong_setting_is_reported_and_has_its_default():
    result = run("config", "show", "--block-size", "0", code=2)
    assert "--block-size is '0'" in result.stderr
    assert re.search(r"^block_size +16 +default$", result.stdout, re.MULTILINE)


# plugins options


def test_the_options_of_plugins_are_listed_with_type_default_and_description():
    records = json.loads(run("plugins", "options", "--format", "json").stdout)
    by_name = {f"{r['plugin']}.{r['option']}": r for r in records}
    option = by_name["moe_allowlist.extend"]
    assert option["type"] == "tuple[str, ...]"
    assert option["default"] == []
    assert option["description"] == "Architectures added to the list."
    assert option["description"] in run("plugins", "options", "MOE_allowlist").stdout


def test_a_plugin_without_options_and_one_that_is_not_there():
    assert run("plugins", "options", "pcp").stdout == "pcp has no options.\n"
    assert "did you mean 'pcp'?" in run("plugins", "options", "pcpp", code=2).stderr
    assert run("plugins", "options", "-p", "no:moe_allowlist").stdout == "No plugin has options.\n"


# env


def test_env_reports_what_is_here():
    found = json.loads(run("env", "-p", "no:pcp", "--format", "json").stdout)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["pluggy"]["version"]
    assert {p["name"]: p["status"] for p in found["plugins"]}["pcp"] == "blocked"
    assert 1 <= found["cpu"]["cores"] <= os.cpu_count()
    assert found["memory"]["total"] >= found["memory"]["available"] > 0
    said = found["attention"]
    assert set(said) >= {"flash_attn", "torch_flash", "sdpa"} or "error" in said
    assert said.get("sdpa") is None
    assert "cache" in run("env").stdout


def test_a_broken_package_costs_only_its_row(monkeypatch):
    def broken(name):
        raise OSError(f"{name}: undefined symbol\n  _ZN3c10")

    monkeypatch.setattr(env_probes, "version", lambda name: "1.2.3")
    monkeypatch.setattr(env_probes, "import_module", broken)
    found = json.loads(run("env", "--format", "json").stdout)
    told = {"version": "1.2.3", "error": "import fails: OSError: torch: undefined symbol _ZN3c10"}
    assert found["packages"]["torch"] == told
    assert found["packages"]["pluggy"] == {"version": "1.2.3"}
    assert "OSError" in found["gpus"]["error"]
    assert "OSError" in found["dtype"]["error"]
    output = " ".join(run("env").stdout.split())
    assert "torch 1.2.3: import fails: OSError" in output
    assert "Traceback" not in output


def test_env_without_torch(monkeypatch):
    real = env_probes.package
    monkeypatch.setattr(env_probes, "package", lambda n: None if n == "torch" else real(n))
    monkeypatch.setattr(env_probes, "_gpus_by_driver", lambda: [])
    found = json.loads(run("env", "--format", "json").stdout)
    assert found["packages"]["torch"] is None
    assert found["dtype"] == found["attention"] == {"error": "torch is not installed"}
    assert re.search(r"^torch +not installed$", run("env").stdout, re.MULTILINE)


@pytest.mark.parametrize("raised", [SystemExit(3), RecursionError(), ValueError("x\ny")])
def test_no_probe_ends_the_command(monkeypatch, raised):
    def probe(*arguments):
        raise raised

    probes = ("memory", "gpus", "ranks", "dtype", "attention", "usable_cores", "instructions")
    for name in probes:
        monkeypatch.setattr(env_probes, name, probe)
    assert run("env").stdout.count(type(raised).__name__) == len(probes)


@pytest.mark.parametrize(
    ("gpus", "nccl", "said"),
    [
        ([], False, "one per CPU core, 3 here (gloo); more share them; ray is not installed"),
        ([{}, {}], True, "one per GPU, 2 here (nccl); ray is not installed"),
        ([{}, {}], False, "one per CPU core, 3 here (gloo)"),
    ],
)
def test_env_says_what_there_is_for_ranks(monkeypatch, gpus, nccl, said):
    distributed = SimpleNamespace(is_nccl_available=lambda: nccl, is_gloo_available=lambda: True)
    monkeypatch.setattr(env_probes, "gpus", lambda: gpus)
    monkeypatch.setattr(env_probes, "usable_cores", lambda: 3)
    monkeypatch.setattr(env_probes, "package", lambda name: None)
    monkeypatch.setattr(env_probes, "import_module", lambda name: distributed)
    text, is_wrong = env._ranks(env_probes.ranks())
    assert said in text
    assert not is_wrong


def test_the_processor_is_read_from_linux_where_torch_does_not_tell(tmp_path, monkeypatch):
    def no_torch(name):
        raise ImportError(name)

    monkeypatch.setattr(env_probes, "import_module", no_torch)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Quick 9000\nflags\t\t: fpu avx2 avx512f amx_bf16\n")
    monkeypatch.setattr(env_probes, "_CPUINFO", cpuinfo)
    assert env_probes.instructions() == ["AVX2", "AVX512", "AMX-BF16"]
    assert env_probes.cpu()["model"] == "Quick 9000"


def test_what_torch_says_goes_before_what_linux_says(monkeypatch):
    capabilities = {"avx2": True, "avx512_f": False, "avx512_bf16": True}
    torch = SimpleNamespace(cpu=SimpleNamespace(get_capabilities=lambda: capabilities))
    monkeypatch.setattr(env_probes, "import_module", lambda name: torch)
    assert env_probes.instructions() == ["AVX2", "AVX512-BF16"]


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 4), ("150000 100000", 2), ("900000 100000", 4), ("", 4)]
)
def test_a_containers_quota_limits_the_cores(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(env_probes, "_CGROUP", tmp_path)
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert env_probes.usable_cores() == cores


# explain as a flowchart


def ballot(text="r", status="decisive", by=None):
    return CountedBallot("p", "d", "1", "vote", "v1", text, 0, status=status, overridden_by=by)


def test_the_flowchart_has_ballots_the_count_and_the_outcome():
    lines = run("explain", "llama.json", "--format", "mermaid").stdout.splitlines()
    assert lines[0] == "flowchart LR"
    assert any("runner_v2 votes for v2" in line for line in lines)
    assert '    ballot0 -->|"decisive"| count' in lines
    assert any(line.startswith('    outcome(["v2 serves llama.json.') for line in lines)
    assert "    count --> outcome" in lines


def test_the_flowchart_shows_the_choice_who_overrode_and_problems():
    decision = Decision(
        runner="v1",
        explicit=ExplicitChoice("v1", "command line", "--runner"),
        ballots=(ballot(status="overridden", by="--runner"),),
        problems=(Problem("error", "too big"), Problem("note", "by the way")),
    )
    chart = flowchart(decision, "m")
    assert '"You asked<br>--runner: v1"' in chart
    assert '|"overridden by --runner"|' in chart
    assert "too big" in chart
    assert "by the way" not in chart


def test_nothing_in_a_label_has_a_meaning_to_mermaid():
    evil = 'a"] --> b["c`<script>|x|{y}#quot;\n%% \\n & end'
    chart = flowchart(Decision("v1", ballots=(ballot(evil),), problems=()), evil)
    for line in chart.splitlines():
        for label in re.findall(r'"(.*?)"', line):
            assert not set(label.replace("<br>", "")) & set('"`<>|{}[]&\\'), line
            assert re.fullmatch(r"([^#]|#\d+;)*", label), line
        assert line.count('"') in (0, 2)
    assert "a#34;#93; --#62; b#91;#34;c#96;#60;script#62;" in chart


# explain --diff


def compared(*arguments, code=0):
    return json.loads(run("explain", *arguments, "--format", "json", code=code).stdout)


def test_a_comparison_shows_only_what_differs():
    found = compared("llama.json", "--diff", "--block-size 32")
    assert found["left"]["outcome"] == found["right"]["outcome"] == "v2 serves llama.json."
    (row,) = found["settings"]
    assert row["name"] == "block_size"
    assert (row["left"]["value"], row["right"]["value"]) == (16, 32)
    assert row["right"]["setting"] == "--block-size"
    for topic in ("facts", "needs", "ballots", "problems", "plugins"):
        assert found[topic] == []


def test_two_models_differ_in_facts_needs_and_ballots():
    found = compared("llama.json", "--diff", "moe.json")
    facts = {row["name"]: (row["left"], row["right"]) for row in found["facts"]}
    assert facts["is_moe"] == (False, True)
    assert "evidence" not in facts
    assert [row["name"] for row in found["needs"]] == ["moe"]
    rows = {row["name"]: (row["left"], row["right"]) for row in found["ballots"]}
    left, right = rows.pop("moe_allowlist discourages v2")
    assert (left, right["status"]) == (None, "decisive")
    left, right = rows.pop("runner_v2 votes for v2")
    assert (left["status"], right["status"]) == ("decisive", "overridden")
    assert not rows


def test_two_plugin_sets_differ_in_plugins_and_ballots():
    found = compared("moe.json", "--diff", "-p no:moe_allowlist")
    (plugin,) = found["plugins"]
    assert (plugin["left"]["status"], plugin["right"]["status"]) == ("active", "blocked")
    # the vote that was cancelled is decisive without who cancelled it
    ballots = ["moe_allowlist discourages v2", "runner_v2 votes for v2"]
    assert [row["name"] for row in found["ballots"]] == ballots
    # options that nobody set, and that went with the plugin, are no difference
    assert [row["name"] for row in found["settings"]] == ["plugins"]


def test_a_ballot_whose_fate_changes_is_a_row():
    arguments = ("llama.json", "--runner", "v1", "--prefill-context-parallel-size", "2")
    found = compared(*arguments, "--diff", "-p no:pcp --prefill-context-parallel-size 1", code=2)
    assert found["left"]["runner"] is None
    assert found["right"]["runner"] == "v1"
    assert "pcp requires v2" in [row["name"] for row in found["ballots"]]
    assert any(row["left"] and row["right"] is None for row in found["problems"])


def test_repeatable_flags_add_up_and_others_win(tmp_path):
    (tmp_path / "other.yaml").write_text("max-num-seqs: 3\n")
    arguments = ("llama.json", "-p", "no:pcp", "--block-size", "8")
    words = "-p no:moe_allowlist --block-size 32 --config other.yaml"
    found = compared(*arguments, "--diff", words)
    values = {row["name"]: row["right"]["value"] for row in found["settings"]}
    assert values == {
        "plugins": ["no:pcp", "no:moe_allowlist"],
        "block_size": 32,
        "max_num_seqs": 3,
    }


def test_the_comparison_for_a_person():
    output = run("explain", "llama.json", "--diff", "moe.json --block-size 32").stdout
    assert "left   v2 serves llama.json." in output
    assert "right  v1 serves moe.json." in output
    assert re.search(r"^  block_size +16 +32 \(--block-size\)$", output, re.MULTILINE)
    assert re.search(r"^  is_moe +off +on$", output, re.MULTILINE)
    assert not [line for line in output.splitlines() if len(line) > 80]
    assert "Nothing differs." in run("explain", "llama.json", "--diff", "").stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--blok-size 3", "--block-size"),
        ("a b", "b"),
        ("--runner", "--runner"),
        ("--help", "--help"),
        ("--format json", "--format"),
        ("'", "cannot be split"),
    ],
)
def test_words_that_are_no_flags_are_refused_by_name(words, told):
    result = run("explain", "llama.json", "--diff", words, code=2)
    assert "--diff" in result.stderr
    assert told in result.stderr


def test_a_comparison_is_no_flowchart():
    assert "--diff" in run("explain", "m", "--diff", "", "--format", "mermaid", code=2).stderr
