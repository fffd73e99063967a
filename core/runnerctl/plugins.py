"""`PluginHost`: finds plugins, keeps what became of each, and asks them one at a time.

A host is a plain object: nothing is loaded at import, nothing is global, and two
hosts do not disturb each other. pluggy parses and checks the plugins; the host calls
each implementation itself, so that every answer has a name on it and a plugin that
raises loses nobody else's answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from runnerctl.ballots import Discourage, Forbid, Require, StampedBallot, Vote, stamp
from runnerctl.config.fact_overrides import FactOverrides, Supplied, plain_copy
from runnerctl.decision import Decision, PluginRecord
from runnerctl.plugin_checks import (
    GUARDED,
    Implementation,
    backend_specs,
    check_host_version,
    collect,
    explain,
    implementations,
    new_manager,
    options_model,
    runner_specs,
    transform_specs,
)
from runnerctl.plugin_discovery import Wishes, clashes, fold, installed
from runnerctl.plugin_faults import called, hook_fault, load_fault
from runnerctl.plugin_roll import LoadedPlugin, Roll, settle
from runnerctl.problems import Problem
from runnerctl.runner.attention.registry import Backends
from runnerctl.runner.batch_transform import RegisteredTransform
from runnerctl.runner.spec import RunnerSpec

if TYPE_CHECKING:
    from pydantic import BaseModel

    from runnerctl.config import EngineConfig

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_BALLOTS = (Vote, Discourage, Require, Forbid)


class PluginHost:
    """The plugins of one engine or one decision.

    `PluginHost()` is empty; `PluginHost.discover()` has what is installed. The order
    in which plugins are registered never matters.

    Args:
        strict: a plugin that cannot load, or that raises in a hook, is an error
            instead of a warning.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._manager = new_manager()
        self._loaded: list[LoadedPlugin] = []
        self._problems: list[Problem] = []
        self._wishes = Wishes()
        self._roll: Roll | None = None
        self._timings: dict[str, dict[str, float]] = {}

    @classmethod
    def discover(
        cls,
        *,
        plugins: Sequence[str] = (),
        allowed: Sequence[str] | None = None,
        strict: bool = False,
        plugins_setting: str = "-p",
        allowed_setting: str = "RUNNERCTL_PLUGINS",
    ) -> PluginHost:
        """Load the installed plugins, one at a time, in name order. Never raises for a bad one.

        Args:
            plugins: `NAME` must load; `no:NAME` is not imported.
            allowed: the only third-party plugins that may load; None for all. A plugin
                named in `plugins` is allowed by that.
            strict: as for `PluginHost`.
            plugins_setting, allowed_setting: how the user spelled the two settings, for
                messages.
        """
        host = cls(strict=strict)
        host._wishes = Wishes.of(plugins, allowed, plugins_setting, allowed_setting)
        candidates = installed()
        host._problems += host._wishes.problems(c.name for c in candidates)
        clashing = clashes(candidates)
        for c in candidates:
            record = PluginRecord(c.name, c.distribution, c.version, "active")
            if reason := host._wishes.block_reason(c):
                host._loaded.append(LoadedPlugin(replace(record, status="blocked", error=reason)))
            elif reason := clashing.get(c, ""):
                host._fail(record, reason)
            else:
                host._load(record, c.load)
        return host

    def register(
        self, plugin: object, *, name: str, distribution: str = "", version: str = ""
    ) -> PluginRecord:
        """Add a plugin from code. A plugin that does not fit is recorded as failed, not raised.

        Args:
            plugin: a module, or any object with `@hookimpl` functions or methods.
            name: its name, as an entry point would give it.
            distribution, version: what messages say it came from.

        Returns:
            what became of it. A clash with other plugins shows only in `records`.
        """
        record = PluginRecord(fold(name), distribution, version, "active")
        taken = [x.record for x in self._loaded if x.record.name == record.name]
        if record.name in self._wishes.blocked:
            reason = self._wishes.blocking(record.name)
            self._roll = None
            self._loaded.append(LoadedPlugin(replace(record, status="blocked", error=reason)))
        elif any(other.status != "blocked" for other in taken):
            self._fail(record, f"the name is taken by {called(taken[0])}")
        elif not record.name:
            self._fail(record, "it has no name")
        else:
            self._load(record, lambda: plugin)
        return self._loaded[-1].record

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """What became of each plugin, in name order."""
        return self._settled().records

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What was wrong at load."""
        return self._settled().problems

    @property
    def runners(self) -> Mapping[str, RunnerSpec]:
        """The runners that active plugins provide, by name, with what other plugins add."""
        return self._settled().runners

    @property
    def attention_backends(self) -> Backends:
        """The attention backends there are, core's own included, in the order of preference."""
        return self._settled().attention_backends

    @property
    def batch_transforms(self) -> tuple[RegisteredTransform, ...]:
        """The ways of active plugins to share a step among ranks."""
        return self._settled().batch_transforms

    @property
    def timings(self) -> dict[str, dict[str, float]]:
        """Seconds spent in each hook of each plugin so far; `import` is its import.

        Not part of a Decision, which is the same every time. Hooks that were not called
        are absent.
        """
        return {name: dict(hooks) for name, hooks in sorted(self._timings.items())}

    def provider(self, runner: str) -> PluginRecord:
        """The plugin that provides `runner`.

        Raises:
            KeyError: nobody provides it.
        """
        return self._settled().providers[runner]

    def validated_options(
        self, raw: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Mapping[str, BaseModel], tuple[Problem, ...]]:
        """One options object per plugin that declares options, from what the user wrote.

        Args:
            raw: values by plugin name and option. Text for an option that takes a list
                is split at commas.

        Returns:
            the objects (defaults where nothing valid was given), and an error for each
            unknown plugin, unknown option and wrong value.
        """
        from runnerctl.plugin_options import validated

        options, problems = validated(raw, self._settled().options, self.records)
        return options, tuple(problems)

    def implementations(self, hook: str) -> Sequence[tuple[PluginRecord, Implementation]]:
        """The functions of active plugins for a hook, in name order, to be called one by one."""
        return self._settled().implementations.get(hook, ())

    @property
    def options(self) -> Mapping[str, type[BaseModel]]:
        """The options model of each active plugin that declares one, by plugin name."""
        return self._settled().options

    def model_facts(
        self, config_json: Mapping[str, Any], *, strict: bool = False
    ) -> tuple[list[Supplied], list[Problem]]:
        """Ask every plugin's `register_model_facts`, each with a copy of its own."""
        answers, problems = self._ask(
            "register_model_facts",
            lambda: {"config_json": plain_copy(config_json)},
            (FactOverrides,),
            "warning" if not (strict or self.strict) else "error",
            "The model is taken for what the others make of its config, which may be wrong",
        )
        return [Supplied(record.name, overrides) for record, overrides in answers], problems

    def ballots(
        self, config: EngineConfig, *, strict: bool = False
    ) -> tuple[list[StampedBallot], list[Problem]]:
        """Ask every plugin's `select_runner`; stamp each ballot with its origin."""
        answers, problems = self._ask(
            "select_runner",
            lambda: {"config": config},
            _BALLOTS,
            "warning" if not (strict or self.strict) else "error",
            "The vote is counted without what it had left to say, which could have been a veto",
        )
        stamped = [stamp(b, r.name, r.distribution, r.version) for r, b in answers]
        return stamped, problems

    def validate(
        self, config: EngineConfig, decision: Decision, *, strict: bool = False
    ) -> list[Problem]:
        """Ask every plugin's `validate_config`; name the plugin in each problem."""
        answers, problems = self._ask(
            "validate_config",
            lambda: {"config": config, "decision": decision},
            (Problem,),
            "warning" if not (strict or self.strict) else "error",
            "What it would have reported is not known",
        )
        return [replace(problem, plugin=r.name) for r, problem in answers] + problems

    def _ask(
        self,
        hook: str,
        arguments: Callable[[], Mapping[str, Any]],
        kinds: tuple[type, ...],
        severity: Literal["error", "warning"],
        consequence: str,
    ) -> tuple[list[tuple[PluginRecord, Any]], list[Problem]]:
        """Every answer with the record of the plugin that gave it, and the faults.

        What a plugin answered before its fault counts: a veto must not get lost.
        `arguments` are made anew for each plugin.
        """
        answers: list[tuple[PluginRecord, Any]] = []
        problems = []
        for record, implementation in self.implementations(hook):
            given: list[Any] = []
            started = perf_counter()
            try:
                collect(implementation(arguments()), kinds, given)
            except GUARDED as error:
                problems.append(hook_fault(record, hook, error, severity, consequence))
            self.add_time(record.name, hook, started)
            answers += [(record, answer) for answer in given]
        return answers, problems

    def _load(self, record: PluginRecord, load: Callable[[], object]) -> None:
        """Import, check and ask one plugin for its runners, backends and options."""
        started = perf_counter()
        try:
            plugin = load()
        except GUARDED as error:
            logger.debug("importing %s", called(record), exc_info=error)
            self._fail(record, f"import failed: {explain(error)}")
            return
        finally:
            self.add_time(record.name, "import", started)
        try:
            check_host_version(plugin)
            found = implementations(self._manager, plugin, record.name)
            record = replace(record, hooks=tuple(sorted(found)))
            specs = self._timed(record, "register_runners", runner_specs, found)
            backends = self._timed(record, "register_attention_backends", backend_specs, found)
            options = self._timed(record, "register_options", options_model, found)
            transforms = self._timed(record, "register_batch_transforms", transform_specs, found)
        except GUARDED as error:
            logger.debug("loading %s", called(record), exc_info=error)
            self._fail(record, explain(error))
            return
        self._roll = None
        self._loaded.append(LoadedPlugin(record, found, specs, backends, options, transforms))

    def _timed(
        self,
        record: PluginRecord,
        hook: str,
        ask: Callable[[Iterable[Implementation]], _Answer],
        found: Mapping[str, Sequence[Implementation]],
    ) -> _Answer:
        started = perf_counter()
        try:
            return ask(found.get(hook, ()))
        finally:
            if hook in found:
                self.add_time(record.name, hook, started)

    def add_time(self, plugin: str, hook: str, started: float) -> None:
        """Count the time since `started`, by `perf_counter`, as spent in a hook of a plugin."""
        hooks = self._timings.setdefault(plugin, {})
        hooks[hook] = hooks.get(hook, 0.0) + perf_counter() - started

    def _fail(self, record: PluginRecord, why: str) -> None:
        self._roll = None
        self._loaded.append(LoadedPlugin(replace(record, status="failed", error=why)))
        must = self.strict or record.name in self._wishes.required
        self._problems.append(load_fault(record, why, "error" if must else "warning"))

    def _settled(self) -> Roll:
        if self._roll is None:
            self._roll = settle(self._loaded, self._problems)
        return self._roll
