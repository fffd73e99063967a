"""Commands that plugins add with `register_commands`, and what a faulty one costs the others."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from runnerctl import PluginHost, hookimpl
from runnerctl import plugin_discovery as discovery
from runnerctl.cli.app import app
from runnerctl.cli.plugins_commands import plugin_commands, plugin_words
from runnerctl.errors import UserError


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("RUNNERCTL_", "VLLM_")):
            monkeypatch.delenv(name)


def plugin(register_commands):
    return SimpleNamespace(register_commands=hookimpl(register_commands))


def adding(*names, says="hello"):
    """A plugin whose commands print `says`."""

    def register_commands(app):
        for name in names:
            app.command(name)(lambda: print(says))

    return plugin(register_commands)


@pytest.fixture
def install(monkeypatch):
    """Makes plugins look installed next to the built-in ones; returns the names imported."""
    built_in = discovery.entry_points(group="runnerctl.plugins")

    def installed(**plugins):
        imported = []

        def point(name, found):
            def load():
                imported.append(name)
                return found

            dist = SimpleNamespace(name=f"{name}-dist", version="6.6")
            return SimpleNamespace(name=name, dist=dist, load=load)

        points = [*built_in, *(point(name, found) for name, found in plugins.items())]
        monkeypatch.setattr(discovery, "entry_points", lambda group: points)
        return imported

    return installed


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def commands_in(help_text):
    return [line.split()[0] for line in help_text.partition("Commands:")[2].splitlines() if line]


def test_a_plugin_adds_a_command_and_a_group(install):
    def register_commands(app):
        group = typer.Typer(help="Things of acme.")

        @group.command()
        def status(device: str = "cpu"):
            """How the device is."""
            print(f"{device} is fine")

        @app.command()
        def doctor(count: int = 1):
            """Check this machine."""
            print("checked" * count)

        app.add_typer(group, name="acme")

    install(acme=plugin(register_commands))
    assert "doctor    Check this machine." in run("--help").stdout
    assert run("doctor", "--count", "2").stdout == "checkedchecked\n"
    assert run("acme", "status", "--device", "npu").stdout == "npu is fine\n"
    assert "--device" in run("acme", "status", "--help").stdout
    assert "│" not in run("acme", "--help").stdout  # plain, as ours


def test_a_misspelt_command_of_a_plugin_gets_a_suggestion(install):
    install(acme=adding("doctor"))
    assert "'doctor'" in run("docter", code=2).stderr


def test_our_commands_import_no_plugin_to_be_found(install):
    imported = install(acme=adding("doctor"))
    run("models", "--help")
    assert imported == []


def unbuildable(thing: int | str):
    """typer has no option of this type."""


@pytest.mark.parametrize(
    "fault",
    [
        plugin(lambda app: 1 / 0),
        plugin(lambda app: sys.exit(3)),
        plugin(lambda app: app),
        plugin(lambda app: None),
        plugin(lambda app: app.callback()(lambda: None) and None),
        plugin(lambda app: app.command("odd")(unbuildable) and None),
    ],
    ids=["raises", "exits", "returns", "adds none", "callback", "cannot be built"],
)
def test_a_faulty_plugin_loses_its_own_commands_only(install, fault):
    install(bad=fault, good=adding("doctor"))
    result = run("--help")
    assert {"doctor", "explain"} <= set(commands_in(result.stdout))
    told = " ".join(result.stderr.split())
    for words in ("plugin 'bad' (bad-dist 6.6)", "'register_commands'", "-p no:bad"):
        assert words in told
    assert "Traceback" not in result.output
    assert run("doctor").stdout == "hello\n"
    assert run("plugins", "list").stderr == ""


def test_strict_plugins_make_the_fault_an_error(install, monkeypatch):
    install(bad=plugin(lambda app: 1 / 0), good=adding("doctor"))
    monkeypatch.setenv("RUNNERCTL_STRICT_PLUGINS", "1")
    assert run("doctor", code=2).stdout == ""
    assert "doctor" in commands_in(run("--help").stdout)


def test_a_name_of_ours_is_kept_and_the_fault_names_both(install):
    install(bad=adding("explain", "other"))
    result = run("--help")
    told = " ".join(result.stderr.split())
    assert "plugin 'bad'" in told
    assert "runnerctl itself has a command 'explain' too" in told
    assert commands_in(result.stdout).count("explain") == 1
    assert "Show which runner" in run("explain", "--help").stdout
    assert run("other").stdout == "hello\n"


@pytest.mark.parametrize("order", [("aa", "zz"), ("zz", "aa")])
def test_a_name_of_two_plugins_is_neithers_whatever_the_order(order):
    host = PluginHost()
    for name in order:
        host.register(adding("same", f"only-{name}"), name=name)
    commands, problems = plugin_commands(host, {"explain"})
    assert list(commands) == ["only-aa", "only-zz"]
    assert [p.plugin for p in problems] == ["aa", "zz"]
    for problem, other in zip(problems, ("zz", "aa"), strict=True):
        assert f"plugin '{other}' has a command 'same' too" in problem.message


@pytest.mark.parametrize(
    "arguments",
    [
        ("-p", "no:acme", "doctor"),
        ("--plugin=no:acme", "doctor"),
        ("-pno:ACME", "doctor"),
        ("doctor", "-p", "no:acme"),
    ],
)
def test_a_blocked_plugin_adds_nothing_and_is_not_imported(install, arguments):
    imported = install(acme=adding("doctor"))
    assert "No such command 'doctor'" in run(*arguments, code=2).stderr
    assert imported == []


def test_blocking_holds_for_help_wherever_the_flag_stands(install):
    imported = install(acme=adding("doctor"))
    for arguments in (("-p", "no:acme", "--help"), ("--help", "-p", "no:acme")):
        assert "doctor" not in run(*arguments).stdout
    assert imported == []


def test_the_allow_list_holds_for_commands(install, monkeypatch):
    imported = install(acme=adding("doctor"), other=adding("surgeon"))
    monkeypatch.setenv("RUNNERCTL_PLUGINS", "other")
    assert "doctor" not in run("--help").stdout
    assert run("surgeon").stdout == "hello\n"
    assert "acme" not in imported
    assert run("-p", "acme", "doctor").stdout == "hello\n"


def test_a_flag_before_the_command_is_handed_on_to_ours(install):
    install(acme=adding("doctor"))
    output = run("-p", "no:pcp", "plugins", "list", "-p", "no:acme", "--format", "json").stdout
    assert output.count('"blocked"') == 2
    assert run("-p", "no:pcp", "models", "--help").exit_code == 0


def test_a_plugins_own_flag_p_is_its_own(install):
    def register_commands(app):
        @app.command()
        def serve(port: Annotated[int, typer.Option("-p")] = 0):
            print(f"port {port}")

    install(acme=plugin(register_commands))
    assert run("serve", "-p", "8080").stdout == "port 8080\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-p", "a", "-p", "no:b", "explain"], ["a", "no:b"]),
        (["-pa", "--plugin=b", "--plugin", "c"], ["a", "b", "c"]),
        (["-p=a"], ["a"]),
        (["cmd", "-p", "8080", "-p", "NO:x"], ["NO:x"]),
        (["cmd", "--", "-p", "no:x"], []),
        (["--prompt", "x", "-p"], []),
        ([], []),
    ],
)
def test_reading_the_flags_ahead(words, expected):
    assert plugin_words(words) == expected


def test_errors_of_a_plugins_command_have_the_usual_exit_codes(install):
    def register_commands(app):
        @app.command()
        def user():
            raise UserError("the cable is loose", remedy="plug it in")

        @app.command()
        def ours():
            raise RuntimeError("a wheel came off")

    install(acme=plugin(register_commands))
    assert "the cable is loose" in run("user", code=2).stderr
    assert "RuntimeError: a wheel came off" in run("ours", code=1).stderr
    shown = CliRunner().invoke(app, ["ours", "--traceback"])
    assert isinstance(shown.exception, RuntimeError)


# completion


def complete(*words, **environ):
    """What a shell would be offered for the last word, and whether torch was imported for it."""
    script = (
        "import sys\n"
        "from runnerctl.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    line = ["runnerctl", *words]
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "_RUNNERCTL_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(line),
            "COMP_CWORD": str(len(line) - 1),
            **environ,
        },
    )
    assert ran.stderr.strip() == "[]"
    return ran.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ex"], ["explain"]),
        (["explain", "--runner", ""], ["auto", "v1", "v2"]),
        (["explain", "--dtype", "flo"], ["float32", "float16"]),
        (["explain", "--format", ""], ["table", "json", "mermaid"]),
        (["explain", "--attention-backend", "s"], ["sdpa"]),
        (["explain", "-p", "no:p"], ["no:pcp"]),
        (["-p", "pc"], ["pcp"]),
        (["plugins", "options", "moe"], ["moe_allowlist"]),
        (["explain", "smol"], ["smollm2-135m"]),
        (["models", "pull", "smol"], ["smollm2-135m"]),
        (["generate", "--model", "smol"], ["smollm2-135m"]),
        (["chat", "--model", "smol"], ["smollm2-135m"]),
    ],
)
def test_the_shell_is_offered_values(words, expected):
    assert complete(*words) == expected


def test_models_of_the_hubs_cache_are_offered(tmp_path):
    (tmp_path / "models--acme--tiny--v2").mkdir()
    assert complete("explain", "ac", HF_HUB_CACHE=str(tmp_path)) == ["acme/tiny--v2"]


def test_completion_can_be_shown_and_installed():
    output = run("--help").stdout
    assert "--install-completion" in output
    assert "--show-completion" in output
