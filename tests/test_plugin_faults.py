"""What goes wrong with a plugin is reported under its name and costs nobody else anything."""

from types import ModuleType, SimpleNamespace

import pytest
from pydantic import BaseModel

from runnerctl import (
    EngineConfig,
    Forbid,
    ModelFacts,
    PluginHost,
    Problem,
    RunnerSpec,
    Vote,
    hookimpl,
)
from runnerctl import plugin_discovery as discovery
from runnerctl.config.engine_config import ModelSection, PluginSection
from runnerctl.deciding import decide_config
from runnerctl.decision import Decision

CONFIG = EngineConfig(model=ModelSection(model="m"), facts=ModelFacts())
STRICT = CONFIG.model_copy(update={"plugins": PluginSection(strict_plugins=True)})


def plugin(**hooks):
    return SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


def runner(name, **fields):
    return plugin(register_runners=lambda: [RunnerSpec(name, "m:f", **fields)])


def host_with(*plugins, strict=False):
    """A host with a working fallback runner, a working voter, and plugins bad1, bad2 ..."""
    host = PluginHost(strict=strict)
    host.register(runner("v1", fallback=True), name="good_runner", distribution="runnerctl")
    host.register(plugin(select_runner=lambda: Vote("v1", "r")), name="good_voter")
    for number, bad in enumerate(plugins, 1):
        host.register(bad, name=f"bad{number}", distribution="bad-dist", version="6.6")
    return host


def assert_failed(host, *words, severity="warning"):
    """`bad1` is left out with one loud problem, and the others still serve."""
    record = next(r for r in host.records if r.name == "bad1")
    assert record.status == "failed"
    (problem,) = host.problems
    assert problem.severity == severity
    assert problem.plugin == "bad1"
    for word in ("'bad1'", "bad-dist", "6.6", *words):
        assert word in problem.message
    assert record.error in problem.message
    assert "-p no:bad1" in problem.remedy
    decision = decide_config(CONFIG, host)
    assert decision.runner == "v1"
    assert [b.plugin for b in decision.ballots] == ["good_voter"]
    assert problem in decision.problems


# at load


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (ImportError("No module named 'acmelib'"), ("import failed", "acmelib")),
        (SystemExit(3), ("import failed", "SystemExit: 3")),
        (RecursionError("too deep"), ("RecursionError",)),
    ],
)
def test_a_plugin_that_cannot_be_imported(monkeypatch, raised, words):
    def load():
        raise raised

    dist = SimpleNamespace(name="bad-dist", version="6.6")
    good = SimpleNamespace(name="runnerctl", version="1")
    points = [
        SimpleNamespace(name="bad1", dist=dist, load=load),
        SimpleNamespace(name="good_runner", dist=good, load=lambda: runner("v1", fallback=True)),
        SimpleNamespace(
            name="good_voter", dist=good, load=lambda: plugin(select_runner=lambda: Vote("v1", "r"))
        ),
    ]
    monkeypatch.setattr(discovery, "entry_points", lambda group: points)
    assert_failed(PluginHost.discover(), *words)
    assert PluginHost.discover(strict=True).problems[0].severity == "error"


def test_ctrl_c_during_an_import_is_not_swallowed(monkeypatch):
    def load():
        raise KeyboardInterrupt

    point = SimpleNamespace(name="a", dist=SimpleNamespace(name="a", version="1"), load=load)
    monkeypatch.setattr(discovery, "entry_points", lambda group: [point])
    with pytest.raises(KeyboardInterrupt):
        PluginHost.discover()


def test_two_distributions_with_one_entry_point_name(monkeypatch):
    points = [
        SimpleNamespace(
            name="acme",
            dist=SimpleNamespace(name=name, version="1"),
            load=lambda: plugin(select_runner=lambda: Vote("v1", "r")),
        )
        for name in ("acme-fork", "acme-plugin")
    ]
    monkeypatch.setattr(discovery, "entry_points", lambda group: points)
    host = PluginHost.discover()
    assert [r.status for r in host.records] == ["failed", "failed"]
    for problem in host.problems:
        assert "acme-fork 1, acme-plugin 1" in problem.message
    assert host.ballots(CONFIG) == ([], [])


def test_a_third_party_cannot_take_the_name_of_a_built_in(monkeypatch):
    points = [
        SimpleNamespace(
            name="runner_v1",
            dist=SimpleNamespace(name=name, version="1"),
            load=lambda name=name: runner(name),
        )
        for name in ("evil", "runnerctl")
    ]
    monkeypatch.setattr(discovery, "entry_points", lambda group: points)
    host = PluginHost.discover()
    assert list(host.runners) == ["runnerctl"]
    assert [(r.distribution, r.status) for r in host.records] == [
        ("evil", "failed"),
        ("runnerctl", "active"),
    ]


def test_a_name_registered_twice_in_code():
    host = host_with(plugin(select_runner=lambda: None))
    host.register(plugin(select_runner=lambda: None), name="BAD1")
    assert "taken by plugin 'bad1' (bad-dist 6.6)" in host.problems[0].message


def test_a_misspelt_hook():
    bad = plugin(selct_runner=lambda config: Vote("v1", "r"))
    assert_failed(host_with(bad), "no hook 'selct_runner'", "did you mean 'select_runner'?")


def test_a_misspelt_hook_of_one_plugin_is_not_blamed_on_the_next():
    bad = plugin(selct_runner=lambda config: None)
    host = host_with(bad, plugin(select_runner=lambda config: None))
    assert [r.name for r in host.records if r.status == "failed"] == ["bad1"]


def test_an_argument_the_hook_does_not_have():
    bad = plugin(select_runner=lambda configuration: Vote("v2", "r"))
    assert_failed(host_with(bad), "select_runner", "configuration")


def test_an_argument_with_a_default_would_never_get_its_value():
    bad = plugin(select_runner=lambda config=None: Vote("v2", "r"))
    assert_failed(host_with(bad), "select_runner", "'config' has a default")


@pytest.mark.parametrize("option", ["wrapper", "hookwrapper"])
def test_wrappers_are_refused(option):
    def select_runner(config):
        return (yield)

    bad = SimpleNamespace(select_runner=hookimpl(**{option: True})(select_runner))
    assert_failed(host_with(bad), "select_runner", "wrappers")


def test_a_plugin_without_any_hook():
    forgot = SimpleNamespace(select_runner=lambda config: Vote("v2", "r"))
    assert_failed(host_with(forgot), "implements no hook", "@runnerctl.hookimpl")


def test_a_class_instead_of_an_object():
    class Plugin:
        @hookimpl
        def select_runner(self, config):
            return None

    assert_failed(host_with(Plugin), "not a class")


@pytest.mark.parametrize("wanted", [">=2", "<0.1", "==0.0.1"])
def test_a_plugin_for_another_version_of_the_host(wanted):
    bad = ModuleType("bad")
    bad.requires_runnerctl = wanted
    bad.select_runner = hookimpl(lambda: Vote("v2", "r"))
    assert_failed(host_with(bad), f"runnerctl {wanted}", "this is runnerctl 0.1.0")


def test_a_plugin_for_this_version_of_the_host_loads():
    good = ModuleType("good")
    good.requires_runnerctl = ">=0.1,<2"
    good.select_runner = hookimpl(lambda: Vote("v1", "r"))
    assert host_with(good).problems == ()


@pytest.mark.parametrize("malformed", ["two or so", 2])
def test_a_malformed_host_requirement(malformed):
    bad = ModuleType("bad")
    bad.requires_runnerctl = malformed
    bad.select_runner = hookimpl(lambda: Vote("v2", "r"))
    assert_failed(host_with(bad), "requires_runnerctl", repr(malformed))


def test_strict_makes_a_plugin_that_cannot_load_an_error():
    host = host_with(plugin(nonsense=lambda: None), strict=True)
    assert_failed(host, "nonsense", severity="error")


# runners and options


def raising(error):
    def hook():
        raise error

    return hook


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (raising(OSError("no device")), ("OSError: no device",)),
        (raising(SystemExit("bye")), ("SystemExit: bye",)),
        (lambda: None, ("RunnerSpec", "None")),
        (lambda: ["v2"], ("RunnerSpec", "str 'v2'")),
        (lambda: [RunnerSpec("auto", "m:f")], ("cannot be named 'auto'",)),
        (lambda: [RunnerSpec("x", "m:f"), RunnerSpec("x", "m:f")], ("twice",)),
        (lambda: [RunnerSpec("x", "m:f", {"moe", 1})], ("capability of 'x'", "int 1")),
    ],
)
def test_register_runners_that_does_not_work(hook, words):
    assert_failed(host_with(plugin(register_runners=hook)), "register_runners", *words)


def test_a_plugin_that_fails_late_is_left_out_with_all_its_hooks():
    bad = plugin(register_runners=lambda: 5, select_runner=lambda: Forbid("v1", "no"))
    assert_failed(host_with(bad), "register_runners")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (runner("v1"), ("runner 'v1'",)),
        (runner("other", fallback=True), ("'other' claims to be the fallback", "'v1'")),
    ],
)
def test_a_runner_or_the_fallback_claimed_twice_is_an_error_naming_both(bad, words):
    assert_failed(host_with(bad), "good_runner", *words, severity="error")


def test_who_keeps_a_disputed_runner_does_not_depend_on_order():
    def winner(order):
        host = PluginHost()
        for name, dist in order:
            host.register(runner("x"), name=name, distribution=dist)
        return host.provider("x").name, host.problems

    claims = [("zz", "runnerctl"), ("aa", "acme")]
    assert winner(claims) == winner(claims[::-1])
    assert winner(claims)[0] == "zz"


class Bare(BaseModel):
    size: int


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda: None, ("pydantic", "None")),
        (lambda: int, ("pydantic",)),
        (lambda: Bare, ("'size' has none",)),
        (raising(KeyError("k")), ("KeyError",)),
    ],
)
def test_register_options_that_does_not_work(hook, words):
    assert_failed(host_with(plugin(register_options=hook)), "register_options", *words)


# while deciding


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError


def yields_then_raises():
    yield Forbid("v2", "first")
    raise ZeroDivisionError("half way")


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (raising(ValueError("bad value")), ("ValueError: bad value", "test_plugin_faults.py")),
        (raising(SystemExit(1)), ("SystemExit",)),
        (lambda: Vote("v2", ""), ("needs a reason",)),
        (lambda: Forbid("v2", "r", None), ("remedy must be text, not None",)),
        (raising(UnprintableError()), ("UnprintableError",)),
        (lambda: "v2", ("Vote or Discourage or Require or Forbid", "str 'v2'")),
        (lambda: 7, ("int 7",)),
        (lambda: {"v2": 1}, ("dict",)),
        (lambda: [("v2", "r")], ("tuple ('v2', 'r')",)),
        (yields_then_raises, ("ZeroDivisionError: half way",)),
    ],
)
def test_a_vote_that_goes_wrong_is_reported_and_the_others_count(hook, words):
    host = host_with(plugin(select_runner=hook))
    decision = decide_config(CONFIG, host)
    assert decision.runner == "v1"
    assert "good_voter" in [b.plugin for b in decision.ballots]
    (problem,) = [p for p in decision.problems if p.plugin == "bad1"]
    assert problem.severity == "warning"
    for word in ("'bad1'", "bad-dist 6.6", "'select_runner'", "could have been a veto", *words):
        assert word in problem.message
    assert [p.severity for p in decide_config(STRICT, host).problems if p.plugin] == ["error"]


def test_what_a_plugin_said_before_it_failed_still_counts():
    ballots, _ = host_with(plugin(select_runner=yields_then_raises)).ballots(CONFIG)
    assert ("bad1", "forbid") in [(b.plugin, b.kind) for b in ballots]


def test_a_validation_that_goes_wrong_loses_no_other_problems():
    complaint = Problem("warning", "too slow")
    host = host_with(
        plugin(validate_config=raising(ValueError("oops"))),
        plugin(validate_config=lambda: [complaint]),
    )
    problems = host.validate(CONFIG, Decision("v1"))
    assert [(p.plugin, p.severity) for p in problems] == [("bad2", "warning"), ("bad1", "warning")]
    assert "'validate_config'" in problems[1].message
    assert "oops" in problems[1].message


@pytest.mark.parametrize("wrong", [{"remedy": None}, {"setting": 3}, {"message": " "}])
def test_a_problem_that_could_not_be_shown_is_the_plugins_fault(wrong):
    fields = {"severity": "error", "message": "m", **wrong}
    decision = decide_config(CONFIG, host_with(plugin(validate_config=lambda: [Problem(**fields)])))
    (problem,) = [p for p in decision.problems if p.plugin == "bad1"]
    assert problem.severity == "warning"
    assert next(iter(wrong)) in problem.message
    assert Decision.from_json(decision.to_json()) == decision


def test_validation_is_not_asked_when_the_selection_failed():
    asked = []
    host = host_with(
        plugin(select_runner=lambda: Forbid("v1", "no"), validate_config=lambda: asked.append(1))
    )
    assert decide_config(CONFIG, host).runner is None
    assert asked == []
