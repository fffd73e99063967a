"""The host: which plugins load, and how it asks them."""

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from runnerctl import (
    Discourage,
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
from runnerctl.config.engine_config import ModelSection
from runnerctl.decision import Decision

CONFIG = EngineConfig(model=ModelSection(model="m"), facts=ModelFacts())


def plugin(**hooks):
    """A plugin object whose functions of these names are marked as hooks."""
    return SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


def voter(runner="v2", **more):
    return plugin(select_runner=lambda config: Vote(runner, "r"), **more)


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins for installed entry points; records which of them were imported."""
    world = SimpleNamespace(imported=[], points=[])

    def add(name, loaded=None, distribution="acme-plugin", version="1.2"):
        def load():
            world.imported.append(name)
            if isinstance(loaded, BaseException):
                raise loaded
            return loaded if loaded is not None else voter()

        dist = SimpleNamespace(name=distribution, version=version)
        world.points.append(SimpleNamespace(name=name, dist=dist, load=load))

    world.add = add
    monkeypatch.setattr(discovery, "entry_points", lambda group: list(world.points))
    return world


def by_name(host):
    return {r.name: r for r in host.records}


def test_the_entry_points_asked_for_are_those_of_the_documented_group(monkeypatch):
    asked = []
    monkeypatch.setattr(discovery, "entry_points", lambda group: asked.append(group) or [])
    PluginHost.discover()
    assert asked == ["runnerctl.plugins"]
    assert EntryPoint("a", "b", asked[0]).group == "runnerctl.plugins"


def test_the_built_in_plugins_are_found_and_all_load():
    host = PluginHost.discover(allowed=())
    active = {r.name for r in host.records if r.status == "active"}
    assert active == {"runner_v1", "runner_v2", "pcp", "moe_allowlist", "hybrid_exclusion"}
    assert host.problems == ()
    assert host.provider("v1").name == "runner_v1"


def test_plugins_load_in_name_order_with_folded_names(installed):
    for name in ("zeta", " Beta ", "alpha"):
        installed.add(name)
    host = PluginHost.discover()
    assert [r.name for r in host.records] == ["alpha", "beta", "zeta"]
    assert [name.strip() for name in installed.imported] == ["alpha", "Beta", "zeta"]
    assert all(r.status == "active" and r.version == "1.2" for r in host.records)


def test_hosts_share_nothing(installed):
    installed.add("a")
    full = PluginHost.discover()
    assert PluginHost().records == ()
    assert len(PluginHost.discover().ballots(CONFIG)[0]) == 1
    full.register(voter(), name="b")
    assert len(PluginHost.discover().records) == 1


# -p and RUNNERCTL_PLUGINS


def test_a_blocked_plugin_is_never_imported(installed):
    installed.add("acme")
    host = PluginHost.discover(plugins=[" NO:Acme "])
    assert installed.imported == []
    assert by_name(host)["acme"].status == "blocked"
    assert "-p no:acme" in by_name(host)["acme"].error
    assert host.problems == ()


def test_a_blocked_name_stays_blocked_for_plugins_registered_in_code(installed):
    host = PluginHost.discover(plugins=["no:mine"])
    assert host.register(voter(), name="Mine").status == "blocked"
    assert host.ballots(CONFIG) == ([], [])


def test_blocking_what_is_not_there_is_a_warning_with_a_suggestion(installed):
    installed.add("moe_allowlist")
    (problem,) = PluginHost.discover(plugins=["no:moe-allowlist"]).problems
    assert problem.severity == "warning"
    assert "did you mean 'moe_allowlist'?" in problem.message


def test_asking_for_a_plugin_that_is_not_there_is_an_error_with_a_suggestion(installed):
    installed.add("acme")
    (problem,) = PluginHost.discover(plugins=["acmee"], plugins_setting="plugins=").problems
    assert problem.severity == "error"
    assert "did you mean 'acme'?" in problem.message
    assert problem.setting == "plugins="


def test_a_plugin_asked_for_by_name_must_load(installed):
    installed.add("acme", ImportError("no module named acmelib"))
    (lenient,) = PluginHost.discover().problems
    (asked,) = PluginHost.discover(plugins=["ACME"]).problems
    assert (lenient.severity, asked.severity) == ("warning", "error")


def test_asking_for_and_blocking_the_same_plugin_is_an_error(installed):
    installed.add("acme")
    host = PluginHost.discover(plugins=["acme", "no:acme"])
    assert [p.severity for p in host.problems] == ["error"]
    assert installed.imported == []


def test_the_allow_list_restricts_third_party_plugins_only(installed):
    installed.add("ours", distribution="RunnerCtl")
    for name in ("one", "two", "three"):
        installed.add(name)
    host = PluginHost.discover(allowed=[" One ", ""], plugins=["two"])
    assert installed.imported == ["one", "ours", "two"]
    assert by_name(host)["three"].status == "blocked"
    assert "RUNNERCTL_PLUGINS" in by_name(host)["three"].error
    assert host.problems == ()


def test_an_empty_allow_list_lets_no_third_party_in(installed):
    installed.add("one")
    assert by_name(PluginHost.discover(allowed=[]))["one"].status == "blocked"


def test_an_allowed_name_nobody_provides_is_an_error(installed):
    installed.add("acme")
    host = PluginHost.discover(allowed=["acme", "acne"], allowed_setting="allowed_plugins=")
    (problem,) = host.problems
    assert problem.severity == "error"
    assert "'acne'" in problem.message
    assert "did you mean 'acme'?" in problem.message
    assert problem.setting == "allowed_plugins="


# asking


def test_each_ballot_is_stamped_with_its_origin():
    host = PluginHost()
    host.register(voter("v2"), name="b", distribution="dist-b", version="2")
    host.register(voter("v1"), name="a", distribution="dist-a", version="1")
    ballots, problems = host.ballots(CONFIG)
    origins = [(b.plugin, b.distribution, b.version, b.runner) for b in ballots]
    assert origins == [("a", "dist-a", "1", "v1"), ("b", "dist-b", "2", "v2")]
    assert problems == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, []),
        ([], []),
        (Vote("v1", "r"), ["vote"]),
        ((Vote("v1", "r"), Forbid("v2", "r")), ["vote", "forbid"]),
        ((b for b in [Discourage("v1", "r")]), ["discourage"]),
    ],
)
def test_a_plugin_may_answer_nothing_one_ballot_or_several(answer, expected):
    host = PluginHost()
    host.register(plugin(select_runner=lambda config: answer), name="a")
    ballots, problems = host.ballots(CONFIG)
    assert [b.kind for b in ballots] == expected
    assert problems == []


def test_hooks_get_only_the_arguments_they_ask_for():
    seen = []

    class Plugin:
        @hookimpl
        def select_runner(self):
            seen.append("select")

        @hookimpl(specname="validate_config")
        def check(self, decision):
            seen.append(decision.runner)

    host = PluginHost()
    assert host.register(Plugin(), name="a").hooks == ("select_runner", "validate_config")
    host.ballots(CONFIG)
    host.validate(CONFIG, Decision("v9"))
    assert seen == ["select", "v9"]


def test_problems_carry_the_name_of_the_plugin_that_reported_them():
    host = PluginHost()
    impostor = Problem("error", "bad", plugin="somebody else")
    host.register(plugin(validate_config=lambda config: [impostor]), name="a")
    assert [p.plugin for p in host.validate(CONFIG, Decision("v1"))] == ["a"]


def test_properties_of_a_plugin_object_are_not_run():
    class Plugin:
        @property
        def model(self):
            raise AssertionError("loaded a model")

        @property
        def requires_runnerctl(self):
            raise AssertionError("ran a property")

        @hookimpl
        def select_runner(self):
            return Vote("v1", "r")

    host = PluginHost()
    record = host.register(Plugin(), name="a")
    assert "ran a property" not in record.error
    assert "loaded a model" not in record.error


def test_registration_order_changes_nothing():
    def build(order):
        host = PluginHost()
        for name in order:
            spec = RunnerSpec(f"run-{name}", "m:f", fallback=name == "b")
            host.register(voter(register_runners=lambda spec=spec: [spec]), name=name)
        return host

    def look(host):
        return host.records, host.problems, list(host.runners), host.ballots(CONFIG)

    assert look(build("abc")) == look(build("cab"))


# options


class Options(BaseModel):
    size: int = 3
    extra: tuple[str, ...] = ()


@pytest.fixture
def with_options():
    host = PluginHost()
    host.register(plugin(register_options=lambda: Options), name="acme")
    host.register(voter(), name="plain")
    return host


def test_options_default_and_are_read_by_name(with_options):
    options, problems = with_options.validated_options({})
    assert options == {"acme": Options()}
    options, problems = with_options.validated_options({" ACME ": {"size": "4", "extra": "a, b"}})
    assert options == {"acme": Options(size=4, extra=("a", "b"))}
    assert problems == ()


@pytest.mark.parametrize(
    ("raw", "setting", "words"),
    [
        ({"acmee": {}}, "plugin_options.acmee", "did you mean 'acme'?"),
        ({"acme": {"sise": 1}}, "plugin_options.acme.sise", "did you mean 'size'?"),
        ({"acme": {"size": "many"}}, "plugin_options.acme.size", "'many' does not fit"),
        ({"plain": {"size": 1}}, "plugin_options.plain", "has no options"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(with_options, raw, setting, words):
    options, (problem,) = with_options.validated_options(raw)
    assert (problem.severity, problem.setting) == ("error", setting)
    assert words in problem.message
    assert options["acme"] == Options()


def test_one_wrong_option_leaves_the_others(with_options):
    options, _ = with_options.validated_options({"acme": {"size": "x", "extra": ["a"]}})
    assert options["acme"] == Options(extra=("a",))


def test_options_of_a_blocked_plugin_are_a_warning(installed):
    installed.add("acme", plugin(register_options=lambda: Options))
    host = PluginHost.discover(plugins=["no:acme"])
    options, (problem,) = host.validated_options({"acme": {"size": 1}})
    assert options == {}
    assert problem.severity == "warning"
