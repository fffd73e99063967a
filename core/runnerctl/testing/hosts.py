"""Hosts without entry points, and decisions made by chosen plugins. No torch, no pytest."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from runnerctl.config import EngineConfig, ModelFacts
from runnerctl.deciding import decide_config
from runnerctl.decision import Decision
from runnerctl.hookspecs import hookimpl
from runnerctl.plugins import PluginHost
from runnerctl.resolve import resolve
from runnerctl.runner.spec import CAPABILITIES, RunnerSpec
from runnerctl.testing.configurations import DENSE

ModelLike = Mapping[str, Any] | ModelFacts | EngineConfig | str | Path


class StandInRunners:
    """A plugin whose runners exist only to be chosen; they cannot be started."""

    def __init__(self, specs: Iterable[RunnerSpec]) -> None:
        self._specs = list(specs)

    @hookimpl
    def register_runners(self) -> list[RunnerSpec]:
        """The specs given."""
        return self._specs


def stand_in(name: str, **traits: Any) -> RunnerSpec:
    """A spec that claims every capability, unless `traits` says otherwise."""
    traits.setdefault("capabilities", frozenset(CAPABILITIES))
    return RunnerSpec(name, "runnerctl.testing.hosts:no_runner", **traits)


def no_runner(context: object) -> None:
    """The factory of stand-ins.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("a stand-in runner only takes part in decisions; it cannot run")


def host_with(
    plugins: Mapping[str, object] | Iterable[object],
    *,
    runners: Iterable[RunnerSpec | str] = ("v1", "v2"),
    strict: bool = False,
) -> PluginHost:
    """A host of these plugins and no others, with stand-ins for runners they do not bring.

    Args:
        plugins: modules or objects, by name or not; registered in the order given.
        runners: specs, or names for stand-ins that claim everything. Those that `plugins`
            provide are left to them. The first is the fallback if nobody else is.
        strict: as for `PluginHost`.
    """
    named = plugins if isinstance(plugins, Mapping) else named_plugins(plugins)
    host = PluginHost(strict=strict)
    for name, plugin in named.items():
        host.register(plugin, name=name)
    specs = []
    wanted = [runner for runner in runners if _name(runner) not in host.runners]
    has_fallback = any(spec.fallback for spec in host.runners.values())
    has_fallback |= any(isinstance(r, RunnerSpec) and r.fallback for r in wanted)
    for runner in wanted:
        if isinstance(runner, RunnerSpec):
            specs.append(runner)
            continue
        specs.append(stand_in(runner, fallback=not has_fallback))
        has_fallback = True
    if specs:
        host.register(StandInRunners(specs), name="stand_in_runners")
    return host


def decide_with(
    *plugins: object,
    model: ModelLike = DENSE,
    runners: Iterable[RunnerSpec | str] = ("v1", "v2"),
    **settings: Any,
) -> Decision:
    """The decision that these plugins, and no others, come to.

    Args:
        plugins: modules or objects with hooks.
        model: the content of a `config.json`, `ModelFacts`, a folder or a named model.
        runners: as for `host_with`.
        settings: as for `runnerctl.decide`: `runner`, `prefill_context_parallel_size`,
            `plugin_options` (by a plugin's name: that of its module, or of its class) ...

    Returns:
        The Decision. The environment and installed plugins have no part in it.
    """
    host = host_with(plugins, runners=runners)
    if not isinstance(model, ModelFacts):
        return resolve(model, host=host, environ={}, **settings).decision
    resolved = resolve({}, host=host, environ={}, **settings)
    if resolved.config is None:
        return resolved.decision
    return decide_config(resolved.config.model_copy(update={"facts": model}), host)


def named_plugins(plugins: Iterable[object]) -> dict[str, object]:
    """Each plugin under the name of its module or class; a number is added to a name in use."""
    named: dict[str, object] = {}
    for plugin in plugins:
        if isinstance(plugin, ModuleType):
            base = plugin.__name__.rpartition(".")[2]
        else:
            base = (plugin if inspect.isclass(plugin) else type(plugin)).__name__
        base = base.casefold()
        name, count = base, 1
        while name in named:
            count += 1
            name = f"{base}_{count}"
        named[name] = plugin
    return named


def _name(runner: RunnerSpec | str) -> str:
    return runner if isinstance(runner, str) else runner.name
