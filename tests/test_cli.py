"""The command line: what it prints, where, and with which exit code."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runnerctl.cli.app import app
from runnerctl.config.fields import setting_fields
from runnerctl.decision import Decision

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("RUNNERCTL_", "VLLM_")) or name in ("FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> str:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    return "tiny-llama"


def run(*arguments: str, stdin: str | None = None, code: int = 0):
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def process(*arguments: str, stdin: str | None = None, **environ: str):
    return subprocess.run(
        [sys.executable, "-m", "runnerctl", *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=120,
        check=False,
    )


# ---- explain and validate


def test_explain_begins_with_the_outcome_and_says_why(model) -> None:
    lines = run("explain", model).stdout.splitlines()
    assert lines[0] == "v2 serves tiny-llama."
    assert "runner_v2 votes for it" in lines[1]


def test_explain_shows_ballots_needs_and_plugins(model) -> None:
    output = run("explain", model).stdout
    for heading in ("Ballots", "Needs", "Plugins"):
        assert heading in output.splitlines()
    assert "runner_v2 votes for v2" in output
    assert "runner_v1" in output


def test_explain_as_json_is_the_decision(model) -> None:
    decision = Decision.from_json(run("explain", model, "--format", "json").stdout)
    assert decision.runner == "v2"
    assert decision.facts is not None
    assert decision.facts.model_type == "llama"
    assert [p.name for p in decision.plugins] == sorted(p.name for p in decision.plugins)


def test_an_error_still_prints_and_exits_with_2(model) -> None:
    arguments = (model, "--prefill-context-parallel-size", "2", "--runner", "v1")
    result = run("explain", *arguments, code=2)
    assert result.stdout.startswith("No runner serves ")
    assert "--prefill-context-parallel-size" in result.stdout
    result = run("explain", *arguments, "--format", "json", code=2)
    decision = Decision.from_json(result.stdout)
    assert decision.runner is None
    assert decision.explicit is not None
    assert decision.explicit.setting == "--runner"
    assert "--runner" in {p.setting for p in decision.errors}


def test_validate_says_that_all_is_well(model) -> None:
    lines = run("validate", model).stdout.splitlines()
    assert lines[:2] == ["v2 serves tiny-llama.", "Nothing is wrong with this configuration."]


def test_validate_lists_every_problem_at_once(model) -> None:
    result = run("validate", model, "--block-size", "0", "--dtype", "flaot32", code=2)
    assert "--block-size is '0'" in result.stdout
    assert "--dtype is 'flaot32'" in result.stdout
    assert "did you mean float32?" in result.stdout


def test_a_length_beyond_the_context_names_both(model) -> None:
    result = run("validate", model, "--max-model-len", "4096", code=2)
    assert "--max-model-len is 4096" in result.stdout
    assert "2048" in result.stdout


@pytest.mark.parametrize("command", ["explain", "validate"])
def test_a_model_that_is_not_there(command, tmp_path) -> None:
    result = run(command, str(tmp_path / "nowhere"), code=2)
    assert "nowhere" in result.stdout
    assert result.stdout.startswith("No runner serves ")


def test_no_model_at_all() -> None:
    result = run("explain", code=2)
    assert "no model is given" in result.stdout


def test_the_model_may_come_from_the_file(model, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {model}\nrunner: v1\n")
    arguments = ("explain", "--config", str(tmp_path / "run.yaml"), "--format", "json")
    explicit = Decision.from_json(run(*arguments).stdout).explicit
    assert explicit is not None
    assert (explicit.source, explicit.setting) == ("file", "runner in run.yaml")


@pytest.mark.parametrize(
    ("flags", "variable", "setting"),
    [
        ((), "RUNNERCTL_RUNNER", "RUNNERCTL_RUNNER"),
        (("--runner", "v1"), "RUNNERCTL_RUNNER", "--runner"),
    ],
)
def test_the_explanation_names_where_the_choice_was_made(
    model, flags, variable, setting, monkeypatch
) -> None:
    monkeypatch.setenv(variable, "v1")
    assert f"You asked for it with {setting}" in run("explain", model, *flags).stdout


def test_auto_clears_the_choice_of_a_variable(model, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    output = run("explain", model, "--runner", "auto", "--format", "json").stdout
    assert Decision.from_json(output).explicit is None


def flag_cases() -> list[tuple[str, str]]:
    bad = {"integer": "x", "bytes": "2 bananas", "choice": "nonsense", "text": ""}
    cases = [
        ("--" + setting.name.replace("_", "-"), bad[setting.kind])
        for setting in setting_fields().values()
        if setting.kind in bad and setting.name != "model"
    ]
    return [
        *cases,
        ("--runner", "v3"),
        ("-p", "no-such-plugin"),
        ("--allowed-plugins", "no-such-plugin"),
        ("--plugin-option", "moe_allowlist"),
        ("--plugin-option", "moe_allowlist.extned=[A]"),
        ("--plugin-option", "no_such_plugin.x=1"),
        ("--config", "no-such-file.yaml"),
    ]


@pytest.mark.parametrize(("flag", "value"), flag_cases())
def test_wrong_input_for_a_flag_exits_with_2_and_names_it(flag, value, model) -> None:
    result = run("explain", model, flag, value, "--format", "json", code=2)
    errors = Decision.from_json(result.stdout).errors
    assert errors
    assert any(flag in (p.setting or "") for p in errors), errors
    assert flag in run("explain", model, flag, value, code=2).stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--format", "xml"), "--format"),
        (("--blok-size", "3"), "--block-size"),
        (("--block-size",), "--block-size"),
        (("one", "two"), "two"),
    ],
)
def test_a_malformed_command_line_exits_with_2(arguments, expected) -> None:
    assert expected in run("explain", *arguments, code=2).stderr


def test_an_unknown_command_gets_a_suggestion() -> None:
    assert "'explain'" in run("explian", code=2).stderr


def test_a_wide_table_fits_80_columns_and_has_no_codes(model) -> None:
    for arguments in (("explain", model), ("plugins", "list"), ("explain", "--help")):
        lines = run(*arguments).stdout.splitlines()
        assert not [line for line in lines if len(line) > 80]
        assert "\x1b" not in "".join(lines)


def test_no_color_means_no_codes_even_where_colour_is_forced(model) -> None:
    assert "\x1b" in process("explain", model, FORCE_COLOR="1").stdout
    assert "\x1b" not in process("explain", model, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_help_shows_every_flag_in_full() -> None:
    output = run("generate", "--help").stdout
    for setting in setting_fields().values():
        if setting.name not in ("model", "plugins"):
            assert re.search(rf"--{setting.name.replace('_', '-')}\b", output), setting.name
    assert "Cache (the paged KV cache):" in output


# ---- plugins


def test_plugins_list() -> None:
    output = run("plugins", "list").stdout
    assert re.search(r"^runner_v1 +active +runnerctl ", output, re.MULTILINE)


def test_plugins_list_as_json_says_what_is_blocked() -> None:
    output = run("plugins", "list", "-p", "no:pcp", "--format", "json").stdout
    by_name = {record["name"]: record for record in json.loads(output)}
    assert by_name["pcp"]["status"] == "blocked"
    assert "no:pcp" in by_name["pcp"]["error"]
    assert by_name["runner_v1"]["status"] == "active"


def test_plugins_list_with_a_name_nobody_has() -> None:
    result = run("plugins", "list", "-p", "mo_allowlist", code=2)
    assert "moe_allowlist" in result.stdout
    assert "did you mean 'moe_allowlist'?" in " ".join(result.stderr.split())


# ---- real processes


def test_version_and_the_module_are_the_same_command() -> None:
    import runnerctl

    result = process("--version")
    assert (result.stdout, result.returncode) == (f"runnerctl {runnerctl.__version__}\n", 0)


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "MODEL"], ["plugins", "list"]])
def test_heavy_packages_are_not_imported(arguments, model) -> None:
    script = (
        "import sys\n"
        "from runnerctl.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "    print('HEAVY', sorted(heavy), file=sys.stderr)\n"
    )
    arguments = [model if word == "MODEL" else word for word in arguments]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "HEAVY []" in result.stderr


def test_a_closed_pipe_is_no_traceback(model) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "runnerctl", "explain", model, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    child.wait(timeout=60)
    assert errors == ""


def test_json_keeps_characters_that_stdout_cannot_show(model, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "模"}))
    result = process("explain", ".", "--format", "json", PYTHONIOENCODING="ascii")
    assert json.loads(result.stdout)["facts"]["model_type"] == "模"
    table = process("explain", ".", PYTHONIOENCODING="ascii")
    assert (table.returncode, table.stderr) == (result.returncode, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the device is Linux's")
def test_a_full_disk_is_not_our_fault(model) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "runnerctl", "explain", model],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert result.returncode == 2
    assert result.stderr.startswith("error: the output cannot be written")
    assert len(result.stderr.splitlines()) == 1


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    script = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "from runnerctl.cli.main import main\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stderr) == (130, "\ninterrupted\n")


def test_ctrl_c_exits_with_130(tmp_path) -> None:
    # reading stdin blocks until the signal comes
    child = subprocess.Popen(
        [sys.executable, "-c", READY, "generate", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in errors


READY = """
import sys
from runnerctl.cli import generate
from runnerctl.cli.main import main

read = generate._read_prompt
def announce(prompt):
    print("ready", flush=True)
    return read(prompt)
generate._read_prompt = announce
main()
"""


# ---- whose fault it is


def test_an_unexpected_exception_is_short_and_exits_with_1(model, monkeypatch) -> None:
    def broken(*_, **__):
        raise RuntimeError("a wheel came off")

    monkeypatch.setattr("runnerctl.resolve.resolve", broken)
    result = run("explain", model, code=1)
    assert "RuntimeError: a wheel came off" in result.stderr
    assert "--traceback" in result.stderr
    assert "Traceback" not in result.stderr
    shown = CliRunner().invoke(app, ["explain", model, "--traceback"])
    assert isinstance(shown.exception, RuntimeError)
