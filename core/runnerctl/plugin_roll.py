"""The plugins of a host taken together: who keeps what when two claim it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from runnerctl.decision import PluginRecord
from runnerctl.plugin_checks import Implementation
from runnerctl.plugin_discovery import is_builtin
from runnerctl.plugin_faults import called, load_fault
from runnerctl.problems import Problem
from runnerctl.runner.attention.registry import BUILTIN_BACKENDS, in_order
from runnerctl.runner.attention.spec import AttentionBackendSpec, RegisteredBackend
from runnerctl.runner.batch_transform import (
    BatchTransformSpec,
    RegisteredTransform,
    feature_clash,
    features,
)
from runnerctl.runner.spec import RunnerSpec

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """One plugin as it was found: its record, and what it gave if it is active."""

    record: PluginRecord
    implementations: Mapping[str, Sequence[Implementation]] = field(default_factory=dict)
    specs: tuple[RunnerSpec, ...] = ()
    backends: tuple[AttentionBackendSpec, ...] = ()
    options: type[BaseModel] | None = None
    transforms: tuple[BatchTransformSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Roll:
    """The plugins taken together, after clashes between them are settled."""

    records: tuple[PluginRecord, ...]
    problems: tuple[Problem, ...]
    runners: Mapping[str, RunnerSpec]
    providers: Mapping[str, PluginRecord]
    attention_backends: Mapping[str, RegisteredBackend]
    batch_transforms: tuple[RegisteredTransform, ...]
    options: Mapping[str, type[BaseModel]]
    implementations: Mapping[str, Sequence[tuple[PluginRecord, Implementation]]]


def settle(loaded: Sequence[LoadedPlugin], found: Sequence[Problem]) -> Roll:
    """Settle clashes over names and the fallback; put everything in name order.

    Built-in plugins come first, then name order decides who keeps a disputed name,
    so that the order of registration does not. A clash is an error either way.
    """
    records, problems, active = [], list(found), []
    runners: dict[str, RunnerSpec] = {}
    providers: dict[str, PluginRecord] = {}
    backends = {spec.name: RegisteredBackend(spec) for spec in BUILTIN_BACKENDS}
    owners: dict[str, PluginRecord | None] = dict.fromkeys(backends)
    transforms: list[RegisteredTransform] = []
    given: dict[tuple[str, str], str] = {}
    for plugin in sorted(loaded, key=_settling_order):
        record = plugin.record
        clash = (
            _taken("runner", (spec.name for spec in plugin.specs), providers)
            or _fallback_clash(plugin.specs, runners, providers)
            or _taken("attention backend", (one.name for one in plugin.backends), owners)
            or feature_clash(plugin.transforms, given)
        )
        if record.status == "active" and clash:
            record = replace(record, status="failed", error=clash)
            problems.append(load_fault(record, clash, "error"))
        records.append(record)
        if record.status == "active":
            active.append(plugin)
            for spec in plugin.specs:
                runners[spec.name], providers[spec.name] = spec, record
            for one in plugin.backends:
                backends[one.name] = RegisteredBackend(one, record.name)
                owners[one.name] = record
            for change in plugin.transforms:
                transforms.append(RegisteredTransform(change, record.name))
                given |= {(name, change.feature): called(record) for name in change.runners}
    active.sort(key=lambda plugin: plugin.record.name)
    asked: dict[str, list[tuple[PluginRecord, Implementation]]] = {}
    for plugin in active:
        for hook, functions in plugin.implementations.items():
            asked.setdefault(hook, []).extend((plugin.record, f) for f in functions)
    return Roll(
        records=tuple(sorted(records, key=lambda r: (r.name, r.distribution, r.version))),
        problems=tuple(sorted(problems, key=lambda p: (p.plugin or "", p.message))),
        runners={name: _with_features(runners[name], transforms) for name in sorted(runners)},
        providers=providers,
        attention_backends=in_order(backends.values()),
        batch_transforms=tuple(transforms),
        options={p.record.name: p.options for p in active if p.options is not None},
        implementations=asked,
    )


def _with_features(spec: RunnerSpec, transforms: Sequence[RegisteredTransform]) -> RunnerSpec:
    """The runner with what batch transforms let it do."""
    return replace(spec, capabilities=spec.capabilities | features(spec.name, transforms))


def _settling_order(plugin: LoadedPlugin) -> tuple[bool, str]:
    return (not is_builtin(plugin.record.distribution), plugin.record.name)


def _taken(what: str, names: Iterable[str], owners: Mapping[str, PluginRecord | None]) -> str:
    """Which of the names somebody else provides already; empty if none. No owner: the host."""
    for name in names:
        if name in owners:
            owner = owners[name]
            by = called(owner) if owner else "runnerctl itself"
            return f"{what} {name!r} is provided by {by} too"
    return ""


def _fallback_clash(
    specs: Sequence[RunnerSpec],
    runners: Mapping[str, RunnerSpec],
    providers: Mapping[str, PluginRecord],
) -> str:
    """Why one of `specs` cannot be the fallback that it claims to be; empty if nothing."""
    fallbacks = [s.name for s in runners.values() if s.fallback]
    claims = [s.name for s in specs if s.fallback]
    if fallbacks and claims:
        other = called(providers[fallbacks[0]])
        return f"{claims[0]!r} claims to be the fallback, and so does {fallbacks[0]!r} of {other}"
    if len(claims) > 1:
        return f"only one runner can be the fallback, not {' and '.join(claims)}"
    return ""
