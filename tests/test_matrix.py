"""`runnerctl matrix`: each cell is what `explain` says, and it can say why."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from runnerctl import FactOverrides, Problem, RunnerSpec, Vote, hookimpl
from runnerctl import plugin_discovery as discovery
from runnerctl.cli.app import app
from runnerctl.config.facts import ModelFacts
from runnerctl.config.read_facts import facts_from_config
from runnerctl.matrix import families, kind_of

ROOT = Path(__file__).parent.parent
HEADS = {"num_attention_heads": 4, "num_hidden_layers": 4}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **HEADS}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("RUNNERCTL_", "VLLM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text(json.dumps(LLAMA))


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["matrix", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def cells(*arguments):
    """The outcome by row and column."""
    found = json.loads(run(*arguments, "--format", "json").stdout)
    return {
        row["name"]: {
            cell["column"]: cell["runner"] if cell["ok"] else "refused" for cell in row["cells"]
        }
        for row in found["rows"]
    }


def explained(model, *arguments):
    result = CliRunner().invoke(app, ["explain", model, "--format", "json", *arguments])
    return json.loads(result.stdout)


@pytest.fixture
def third_party(monkeypatch):
    """A plugin with a runner of its own, beside the built-in ones."""
    specs = [RunnerSpec("swift", "m:f", capabilities={"generate", "hybrid", "moe", "tp"})]
    plugin = SimpleNamespace(
        register_runners=hookimpl(lambda: specs),
        select_runner=hookimpl(
            lambda config: Vote("swift", "swift is fast") if config.facts.is_hybrid else None
        ),
        register_model_facts=hookimpl(
            lambda config_json: (
                FactOverrides("it has tides", is_hybrid=True)
                if config_json.get("model_type") == "tidal"
                else None
            )
        ),
    )
    builtin = discovery.entry_points(group=discovery.ENTRY_POINT_GROUP)
    point = SimpleNamespace(
        name="acme", dist=SimpleNamespace(name="acme", version="1"), load=lambda: plugin
    )
    monkeypatch.setattr(discovery, "entry_points", lambda group: [*builtin, point])
    return plugin


# what is decided


@pytest.mark.parametrize("name", ["llama", "mixtral", "jamba", "mamba", "bert"])
def test_each_cell_is_what_explain_says(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(families()[name]))
    row = cells(name)[name]
    flags = {"default": (), "v1": ("--runner", "v1"), "v2": ("--runner", "v2")}
    flags |= {"TP 2": ("--tensor-parallel-size", "2")}
    flags |= {"PCP 2": ("--prefill-context-parallel-size", "2")}
    assert list(row) == list(flags)
    for column, words in flags.items():
        decision = explained("config.json", *words)
        ok = not [p for p in decision["problems"] if p["severity"] == "error"]
        assert row[column] == (decision["runner"] if ok else "refused")


def test_flags_hold_for_every_column_and_a_columns_own_win():
    rows = cells("mixtral", "llama", "--runner", "v1", "--column", "--runner auto")
    assert rows["llama"]["default"] == "v1"
    assert rows["llama"]["v2"] == "v2"
    assert rows["llama"]["--runner auto"] == "v2"
    listed = ("--plugin-option", "moe_allowlist.extend=MixtralForCausalLM")
    assert cells("mixtral")["mixtral"]["default"] == "v1"
    assert cells("mixtral", *listed)["mixtral"]["default"] == "v2"


def test_a_column_may_have_other_plugins():
    rows = cells("mixtral", "--column", "no list: -p no:moe_allowlist")
    assert (rows["mixtral"]["default"], rows["mixtral"]["no list"]) == ("v1", "v2")


def test_blocked_plugins_of_a_column_and_of_all_add_up():
    both = ("-p", "no:runner_v2", "--column", "x: -p no:moe_allowlist")
    assert cells("mixtral", *both)["mixtral"]["x"] == "v1"


def test_a_runner_that_a_plugin_finds_at_fault_is_refused(third_party):
    third_party.validate_config = hookimpl(
        lambda config, decision: [Problem("error", "not on a Tuesday", "wait")]
    )
    assert set(cells("llama")["llama"].values()) == {"refused"}
    assert run("llama").stdout.splitlines()[1].split()[2:] == ["refused"] * 6
    assert "v2 would serve llama, but there is 1 error." in run("--why", "llama,default").stdout


def test_rows_are_model_types_or_whatever_explain_takes(tmp_path):
    rows = cells("mine.json", "llama", "smollm2-135m", "--column", "--block-size 32")
    assert list(rows) == ["mine.json", "llama", "smollm2-135m"]
    assert all(row["default"] == "v2" for row in rows.values())
    # what is on disk goes first
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA | {"num_experts": 4}))
    assert cells("llama")["llama"]["default"] == "v1"


def test_runners_of_other_plugins_have_columns_and_serve(third_party, tmp_path):
    (tmp_path / "tidal.json").write_text(json.dumps({"model_type": "tidal", **HEADS}))
    rows = cells("llama", "jamba", "tidal.json")
    assert list(rows["llama"]) == ["default", "swift", "v1", "v2", "TP 2", "PCP 2"]
    assert (rows["llama"]["default"], rows["llama"]["swift"]) == ("v2", "swift")
    assert rows["jamba"]["default"] == "swift"
    assert rows["tidal.json"]["default"] == "swift"
    shown = run("tidal.json", "--why", "tidal.json,default").stdout
    assert "acme votes for it: Swift is fast." in shown


def test_a_file_of_settings_holds_for_every_column(tmp_path):
    (tmp_path / "run.yaml").write_text("runner: v1\n")
    assert cells("llama", "--config", "run.yaml")["llama"]["default"] == "v1"
    both = cells("llama", "--column", "filed: --config run.yaml")["llama"]
    assert (both["default"], both["filed"]) == ("v2", "v1")


# what is printed


def test_the_default_table_fits_80_columns_and_has_every_kind():
    lines = run().stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"MODEL +KIND +default +v1 +v2 +TP 2 +PCP 2", lines[0])
    kinds = {family: kind_of(facts_from_config(c)) for family, c in families().items()}
    for line in lines[1 : len(kinds) + 1]:
        family = line.split()[0]
        assert re.match(rf"{family} +{re.escape(kinds[family])} ", line)
    assert {"dense", "MoE", "hybrid", "hybrid MoE", "attention-free", "pooling"} <= {
        *kinds.values()
    }


def test_a_long_path_is_shown_by_its_end_and_many_columns_stay_whole(tmp_path):
    path = tmp_path / ("a" * 60) / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    lines = run(str(path), "--column", "a long name of a column: --block-size 32").stdout
    assert re.search(r"^\.\.\.a+/config\.json  dense ", lines, re.MULTILINE)
    assert "a long name of a column" in lines.splitlines()[0]


def test_why_takes_rows_cells_and_architectures_and_groups_what_is_the_same():
    shown = run("--why", "llama").stdout
    assert "default, TP 2: v2 serves llama. runner_v2 votes for it" in shown
    assert "v1: v1 serves llama. You asked for it with --runner v1." in shown
    assert "PCP 2: v2 serves llama. pcp requires it" in shown
    cell = run("--why", "JambaForCausalLM,DEFAULT", "--why", "mamba,v2").stdout
    assert "hybrid_exclusion discourages v2" in " ".join(cell.split())
    assert "it lacks attention_free" in " ".join(cell.split())
    assert "TP 2" not in cell
    grouped = run("llama", "--column", "--block-size 32", "--why", "llama").stdout
    assert "default, TP 2, --block-size 32: v2 serves llama." in grouped


def test_json_has_the_reasons_and_markdown_the_table():
    (row,) = json.loads(run("jamba", "--format", "json", "--why", "jamba,v2").stdout)["rows"]
    assert (row["kind"], row["architectures"]) == ("hybrid MoE", ["JambaForCausalLM"])
    (cell,) = row["cells"]
    assert cell["column"] == "v2"
    assert "it lacks hybrid" in cell["problems"][0]["message"]
    lines = run("llama", "--format", "markdown").stdout.splitlines()
    assert lines[0] == "| model type | kind | default | v1 | v2 | TP 2 | PCP 2 |"
    assert re.fullmatch(r"\| `llama` \| dense \| v2 \| v1 \| v2 \|.*", lines[2])


def test_the_picture_has_a_cell_for_each_decision_with_its_reason(tmp_path):
    run("llama", "jamba", "--svg", "m.svg", "--column", "<odd> & 'name': --block-size 32")
    root = ElementTree.fromstring((tmp_path / "m.svg").read_text())
    texts = [node.text or "".join(node.itertext()) for node in root.iter(f"{SVG}text")]
    assert "llama" in texts
    assert any("<odd> & 'name'" in text for text in texts)
    shown = cells("llama", "jamba", "--column", "<odd> & 'name': --block-size 32")
    drawn = list(root.iter(f"{SVG}g"))
    expected = [cell for row in shown.values() for cell in row.values()]
    assert [group.find(f"{SVG}text").text for group in drawn] == expected
    titles = [group.find(f"{SVG}title").text for group in drawn]
    assert titles[0].startswith("llama, default: v2 serves the model. runner_v2 votes for it")
    fills = {(g.find(f"{SVG}text").text, g.find(f"{SVG}rect").get("fill")) for g in drawn}
    assert len(fills) == len({text for text, _ in fills}) == 3


def test_what_is_uncertain_is_marked():
    assert kind_of(ModelFacts(uncertain=("hm",))) == "dense?"
    assert kind_of(ModelFacts(is_hybrid=True, is_moe=True, is_mla=True)) == "hybrid MLA MoE"
    assert kind_of(None) == "unknown"


def test_a_fault_of_a_plugin_is_told_once(third_party):
    third_party.no_such_hook = hookimpl(lambda: None)
    result = run("llama")
    assert result.stderr.count("'no_such_hook'") == 1
    assert "swift" not in result.stdout


def test_a_warning_about_one_configuration_is_in_its_reasons(third_party):
    third_party.validate_config = hookimpl(
        lambda config, decision: [Problem("warning", "swift is new", "be careful")]
    )
    assert "swift is new" in run("llama", "--why", "llama,default").stdout


# mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lama",), ("'lama' is no model type", "did you mean 'llama'?")),
        (("nowhere/x.json",), ("nowhere/x.json is no folder",)),
        (("--why", "lama"), ("no row is called 'lama'", "did you mean 'llama'?")),
        (("--why", "llama,PCP"), ("no column is called 'PCP'", "did you mean 'PCP 2'?")),
        (("--column", "x: --block-size 0"), ("column 'x'", "--block-size", "above 0")),
        (("--block-size", "0"), ("error: --block-size is '0'",)),
        (("--column", "x: --blok 0"), ("--column 'x'", "No such option: --blok")),
        (("--column", "x: llama"), ("names a model, 'llama'", "models are rows")),
        (("--column", "V1: ", "--column", "v1: "), ("two columns are called 'v1'",)),
        (("--column", "x: 'a"), ("cannot be split into words",)),
        (("--svg", "no/where.svg"), ("--svg", "no/where.svg cannot be written")),
        (("-p", "nobody"), ("nobody",)),
    ],
)
def test_mistakes_are_named(arguments, words):
    result = run(*arguments, code=2)
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_torch_and_transformers_stay_out():
    code = (
        "import sys; from runnerctl.cli.app import app\n"
        "try: app(['matrix', '--svg', 'm.svg', '--why', 'jamba'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# the rows that come with it, and the page made of them


def script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_families_say_what_transformers_says_of_them():
    transformers = pytest.importorskip("transformers")
    made = script("families")
    transformers.logging.set_verbosity_error()
    for name, config in families().items():
        if name not in transformers.CONFIG_MAPPING:
            continue  # newer than this version
        whole = transformers.CONFIG_MAPPING[name](**made.SET.get(name, {}))
        named = {"architectures": config["architectures"]} | made.SET.get(name, {})
        facts = facts_from_config(json.loads(whole.to_json_string(use_diff=False)) | named)
        ours = facts_from_config(config)
        for fact in ("is_moe", "is_hybrid", "is_attention_free", "is_mla", "runner_type"):
            assert getattr(ours, fact) == getattr(facts, fact), name
        assert kind_of(ours) == kind_of(facts)


def test_the_support_page_and_its_picture_are_what_the_script_writes():
    support = script("support")
    matrix = support.built_in()
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == support.page(matrix, support.parity()), "run `make support`"
    picture = (ROOT / "docs" / "support.svg").read_text(encoding="utf-8")
    assert picture == support.drawing(matrix, tooltips=False), "run `make support`"


def test_the_support_page_shows_what_was_run(monkeypatch, tmp_path):
    support = script("support")
    ran = {
        "LlamaForCausalLM": {"model_type": "llama", "status": "served", "reason": ""},
        "BloomForCausalLM": {"model_type": "bloom", "status": "refused", "reason": "a | b\nc"},
    }
    page = support.page(support.built_in(), ran)
    assert re.search(r"^\| `llama` \| .* \| served \|$", page, re.MULTILINE)
    assert re.search(r"^\| `bloom` \| .* \| refused \|$", page, re.MULTILINE)
    assert re.search(r"^\| `jamba` \| .* \| not run \|$", page, re.MULTILINE)
    assert "2 causal language models of `transformers`: 1 served, 1 refused." in page
    assert "| `BloomForCausalLM` | `bloom` | refused | a \\| b c |" in page
    monkeypatch.setattr(support, "PARITY", tmp_path / "parity.json")
    support.PARITY.write_text(json.dumps({"A": {"model_type": "a", "status": "perhaps"}}))
    with pytest.raises(SystemExit, match="A has the status 'perhaps'"):
        support.parity()
