"""`PolicyConformance`: ballots that depend on the configuration, and on nothing else."""

from __future__ import annotations

import builtins
import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, get_args

import pytest

from runnerctl.ballots import StampedBallot, Vote
from runnerctl.config import EngineConfig
from runnerctl.deciding import decide_config
from runnerctl.decision import Decision
from runnerctl.hookspecs import hookimpl
from runnerctl.plugin_checks import collect, implementations, new_manager
from runnerctl.plugins import PluginHost
from runnerctl.problems import Problem, Severity
from runnerctl.testing.ask_policy import HEAVY
from runnerctl.testing.configurations import CONFIGURATIONS, Configuration
from runnerctl.testing.hosts import host_with

UNDER_TEST = "plugin_under_test"

# Asked as often as this, a coin that decides a vote shows both sides.
_TIMES = 6


class Bystander:
    """A plugin that votes like anyone's; what another plugin says must not depend on it."""

    @hookimpl
    def select_runner(self) -> Vote:
        """A vote at the default priority."""
        return Vote("v1", "a bystander votes in every configuration")


class PolicyConformance:
    """Subclass it in a test module, name the plugin, and pytest does the rest.

    Attributes:
        plugin: the module or object under test, with `@hookimpl` functions.
        plugin_options: its options, if it is to be tested with others than the defaults.
        configurations: what it is asked about; override it to add to `CONFIGURATIONS`.
        runners: names of the stand-in runners; the plugin's own are added.

    Example:
        class TestMine(PolicyConformance):
            plugin = my_policy
    """

    plugin: ClassVar[Any]
    plugin_options: ClassVar[Mapping[str, Any]] = {}
    configurations: ClassVar[Mapping[str, Configuration]] = CONFIGURATIONS
    runners: ClassVar[tuple[str, ...]] = ("v1", "v2")

    def test_it_loads(self) -> None:
        """Hooks with known names and fitting signatures, and options with defaults."""
        host = self._host()
        (record,) = [r for r in host.records if r.name == UNDER_TEST]
        assert record.status == "active", record.error
        assert not host.problems, _listed(host.problems)

    def test_it_raises_nothing(self) -> None:
        """Every configuration gets an answer of the right type, if it gets one."""
        for name, host, config in self._asked():
            _, faults = host.ballots(config)
            assert not faults, f"{name}: {_listed(faults)}"
            for runner in host.runners:
                decision = Decision(runner, facts=config.facts, plugins=host.records)
                try:
                    self._validated(config, decision)
                except Exception as error:
                    pytest.fail(f"{name}: validate_config raises for runner {runner!r}: {error!r}")

    def test_ballots_are_deterministic(self) -> None:
        """Asked again, of the same host or of a fresh one, it says the same."""
        for name, host, config in self._asked():
            first = ballots_of(host, config)
            for _ in range(_TIMES):
                for other in (host, self._host()):
                    again = ballots_of(other, config)
                    assert again == first, f"{name}: it said {first}, and then {again}"

    def test_the_facts_it_supplies_depend_on_the_config_alone(self) -> None:
        """Of the same `config.json` it says the same again, with reasons, and raises for none."""
        for name, configuration in self.configurations.items():
            first, faults = self._host().model_facts(configuration.model)
            assert not faults, f"{name}: {_listed(faults)}"
            for supplied in first:
                _check_text(supplied.overrides.reason, f"{name}: the reason of its facts")
            for _ in range(_TIMES):
                again, _ = self._host().model_facts(configuration.model)
                assert again == first, f"{name}: it said {first}, and then {again}"

    def test_the_order_of_plugins_does_not_matter(self) -> None:
        """Registered first or last, and whoever else is there: the same ballots and outcome."""
        others: dict[str, object] = {"bystander_a": Bystander(), "bystander_z": Bystander()}
        alone = self._host()
        for name, config in self._configs(alone):
            expected = ballots_of(alone, config)
            decisions: list[Decision] = []
            for order in itertools.permutations([UNDER_TEST, *others]):
                host = self._host({key: others.get(key, self.plugin) for key in order})
                said = ballots_of(host, config)
                assert said == expected, (
                    f"{name}: alone it said {expected}, registered as {', '.join(order)} {said}"
                )
                decisions.append(decide_config(config, host))
            assert all(d == decisions[0] for d in decisions), f"{name}: the decision differs"

    def test_what_it_says_can_be_written_down(self) -> None:
        """The Decision reads back equal from its JSON: workers get it that way."""
        for name, host, config in self._asked():
            try:
                decision = decide_config(config, host)
                read = Decision.from_json(decision.to_json())
            except Exception as error:
                pytest.fail(f"{name}: the Decision cannot be written down: {error}")
            assert read == decision, f"{name}: the Decision reads back as another"

    def test_ballots_have_reasons_that_a_user_can_read(self) -> None:
        """A line of words; and a hard ballot says what to do about it."""
        for name, host, config in self._asked():
            for ballot in ballots_of(host, config):
                what = f"of the {ballot.kind} for {ballot.runner!r}"
                _check_text(ballot.reason, f"{name}: the reason {what}")
                if ballot.kind in ("require", "forbid"):
                    _check_text(ballot.remedy, f"{name}: the remedy {what}")

    def test_problems_are_well_formed(self) -> None:
        """A known severity, a message that stands alone, and a remedy for each error."""
        for name, host, config in self._asked():
            for problem in self._problems(host, config):
                what = f"{name}: the problem {problem.message!r}"
                assert problem.severity in get_args(Severity), f"{what} is {problem.severity!r}"
                _check_text(problem.message, f"{name}: the message")
                is_name = problem.setting is None or isinstance(problem.setting, str)
                assert is_name, f"{what} has the setting {problem.setting!r}, which is no name"
                if problem.severity == "error":
                    _check_text(problem.remedy, f"{what} is an error; its remedy")

    def test_it_leaves_the_configuration_alone(self) -> None:
        """Everyone reads the same configuration and Decision; nobody writes to them."""
        for name, host, config in self._asked():
            before = copy.deepcopy(config)
            ballots_of(host, config)
            assert config == before, f"{name}: select_runner changed the configuration"
            decision = decide_config(config, host)
            as_decided = copy.deepcopy(decision)
            self._validated(config, decision)
            assert config == before, f"{name}: validate_config changed the configuration"
            assert decision == as_decided, f"{name}: validate_config changed the Decision"

    def test_it_imports_nothing_heavy(self) -> None:
        """Deciding works without torch, and answers in a fraction of a second."""
        with _watch_imports() as imported:
            for _, host, config in self._asked():
                ballots_of(host, config)
                list(self._problems(host, config))
        assert not imported, f"its hooks import {', '.join(sorted(imported))}"

    def test_a_fresh_process_gives_the_same_ballots_without_torch(self) -> None:
        """Neither the import of the module nor the order of a set may show in what it says."""
        plugin = self.plugin
        if not isinstance(plugin, ModuleType) or find_spec(plugin.__name__) is None:
            pytest.skip("only a module that can be imported by its name is tried in a new process")
        question = {
            "plugin": plugin.__name__,
            "name": UNDER_TEST,
            "runners": self.runners,
            "options": dict(self.plugin_options),
            "configurations": {
                n: [dict(c.model), dict(c.settings)] for n, c in self.configurations.items()
            },
        }
        here = {n: [list(b) for b in ballots_of(h, c)] for n, h, c in self._asked()}
        for hash_seed in ("1", "2"):
            there = _in_a_new_process(question, hash_seed)
            assert not there["imported"], f"it imports {', '.join(there['imported'])}"
            for name, said in here.items():
                also = there["ballots"][name]
                assert also == said, f"{name}: here it said {said}, in another process {also}"

    def _host(self, plugins: Mapping[str, object] | None = None) -> PluginHost:
        return host_with(plugins or {UNDER_TEST: self.plugin}, runners=self.runners)

    def _configs(self, host: PluginHost) -> Iterator[tuple[str, EngineConfig]]:
        for name, configuration in self.configurations.items():
            yield name, configuration.resolved(host, UNDER_TEST, self.plugin_options)

    def _asked(self) -> Iterator[tuple[str, PluginHost, EngineConfig]]:
        """Every configuration, with a host to ask about it."""
        host = self._host()
        for name, config in self._configs(host):
            yield name, host, config

    def _problems(self, host: PluginHost, config: EngineConfig) -> Iterator[Problem]:
        """What the plugin says of `config` for each runner that might have been chosen."""
        decision = Decision(None, facts=config.facts, plugins=host.records)
        for runner in host.runners:
            yield from self._validated(config, replace(decision, runner=runner))

    def _validated(self, config: EngineConfig, decision: Decision) -> list[Problem]:
        """Its answers as it gave them, before a host has looked at them."""
        found = implementations(new_manager(), self.plugin, UNDER_TEST)
        given: list[Problem] = []
        for validate in found.get("validate_config", ()):
            collect(validate({"config": config, "decision": decision}), (Problem,), given)
        return given


def ballots_of(host: PluginHost, config: EngineConfig) -> list[StampedBallot]:
    """What the plugin under test says; the order in which it says it has no meaning."""
    stamped, _ = host.ballots(config)
    return sorted((s for s in stamped if s.plugin == UNDER_TEST), key=repr)


def _check_text(text: object, what: str) -> None:
    """See to it that a user can read it: one line of more than one word."""
    readable = isinstance(text, str) and text.isprintable() and len(text.split()) > 1
    assert readable, f"{what} is {text!r}; it must be a line of words that a user can read"


def _listed(problems: Iterable[Problem]) -> str:
    return "; ".join(problem.message for problem in problems)


@contextmanager
def _watch_imports() -> Iterator[set[str]]:
    """Heavy packages that are imported within this, loaded already or not."""
    imported: set[str] = set()
    original = builtins.__import__

    def watched(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] in HEAVY:
            imported.add(name)
        return original(name, *arguments, **named)

    builtins.__import__ = watched
    try:
        yield imported
    finally:
        builtins.__import__ = original


def _in_a_new_process(question: Mapping[str, Any], hash_seed: str) -> Any:
    """The answer of `runnerctl.testing.ask_policy`."""
    ran = subprocess.run(
        [sys.executable, "-m", "runnerctl.testing.ask_policy"],
        input=json.dumps(question),
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
