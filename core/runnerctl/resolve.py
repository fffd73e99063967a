"""From a model and settings to a configuration and its `Decision`; no torch.

`resolve` is what the command line and `LLM` start with; `decide` is its public face.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerctl.config.engine_config import SECTIONS, EngineConfig, Origin, flag
from runnerctl.config.fact_overrides import known_facts, merge_facts
from runnerctl.config.settings import ArgumentSource, Settings, resolve_settings
from runnerctl.deciding import decide_config
from runnerctl.decision import Decision, PluginRecord
from runnerctl.errors import UserError
from runnerctl.parallel_problems import parallel_problems
from runnerctl.plugins import PluginHost
from runnerctl.problems import Problem
from runnerctl.runner.attention.outlook import unavailable_backend
from runnerctl.runner.attention.registry import check_backend_name

if TYPE_CHECKING:
    from runnerctl.config.facts import ModelFacts
    from runnerctl.config.model_reference import ModelReference

ModelLike = str | Path | Mapping[str, Any] | EngineConfig


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything a start needs.

    Attributes:
        config: the configuration; None if the settings or the model are at fault.
        host: the plugins that were asked.
        decision: the outcome, with every problem found on the way.
        reference: where the model is; None if it could not be found, or if an
            `EngineConfig` was given, which names it.
    """

    config: EngineConfig | None
    host: PluginHost
    decision: Decision
    reference: ModelReference | None = None


def decide(
    model: ModelLike,
    *,
    host: PluginHost | None = None,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    **settings: Any,
) -> Decision:
    """Decide which runner serves a model, and say why. Needs no torch and loads no weights.

    Args:
        model: a folder, a file, a named model or a hub id; the content of a
            `config.json` as a mapping; or an `EngineConfig`.
        host: the plugins to ask; by default those that are installed.
        config_file: a YAML file of settings.
        environ: the environment variables; by default those of this process.
        settings: the flags of the command line, with underscores: `runner="v1"`,
            `prefill_context_parallel_size=2`, `plugin_options={...}` ...

    Returns:
        The Decision. It never raises for a bad configuration: `runner` is None then, or
        `errors` says what is wrong.
    """
    return resolve(model, host=host, config_file=config_file, environ=environ, **settings).decision


def resolve(
    model: ModelLike | None,
    *,
    host: PluginHost | None = None,
    source: ArgumentSource = "python",
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    default_model: str | None = None,
    **settings: Any,
) -> Resolved:
    """Settings, then plugins, then the model's facts, then the decision.

    Args:
        model, host, config_file, environ, settings: as for `decide`; a model of None is
            looked for in the other sources.
        source: where `settings` come from, for messages.
        default_model: what to take when no source names a model.

    Returns:
        The configuration and the Decision. A user's mistake never raises; it is a problem
        in the Decision.
    """
    if isinstance(model, EngineConfig):
        return _resolve_config(model, host, {k: v for k, v in settings.items() if v is not None})
    arguments = dict(settings)
    if not isinstance(model, Mapping):
        arguments["model"] = None if model is None else str(model)
    given = _read_settings(arguments, source, config_file, environ)
    host = host or _discover(given)
    options, option_problems = host.validated_options(given.plugin_options)
    problems = [*given.problems, *_named_as_written(option_problems, given)]

    # a Path as it is: unlike text it is never taken for the name of a model
    named = given.values.get("model", default_model)
    named = model if isinstance(model, Mapping | Path) else named
    found = _find_model(named, _where(given, "model"), problems)
    if found is None:
        return Resolved(None, host, _undecided(host, problems, None))
    # settings at fault have their defaults in it; it is not given out then
    values = {**given.values, "model": found.name or "the given config"}
    config = EngineConfig(
        **{
            section: kind(**{name: values[name] for name in kind.model_fields if name in values})
            for section, kind in SECTIONS.items()
        },
        plugin_options=options,
        facts=_facts(found, host, problems, strict=values.get("strict_plugins", False)),
        origins=given.origins,
    )
    malformed = _has_error(problems)
    problems += _setting_problems(config, host)
    if malformed:
        return Resolved(None, host, _undecided(host, problems, config.facts), found)
    return _decided(config, host, problems, found)


def discover_plugins(
    *,
    source: ArgumentSource = "python",
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    **settings: Any,
) -> tuple[tuple[PluginRecord, ...], tuple[Problem, ...]]:
    """What became of each plugin under some settings, and what is wrong with those."""
    host, problems = discover_host(
        source=source, config_file=config_file, environ=environ, **settings
    )
    return host.records, problems


def discover_host(
    *,
    source: ArgumentSource = "python",
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    **settings: Any,
) -> tuple[PluginHost, tuple[Problem, ...]]:
    """The plugins under some settings, and what is wrong with those and with the settings."""
    given = _read_settings(settings, source, config_file, environ)
    host = _discover(given)
    _, option_problems = host.validated_options(given.plugin_options)
    return host, (*given.problems, *_named_as_written(option_problems, given), *host.problems)


def _resolve_config(
    config: EngineConfig, host: PluginHost | None, settings: Mapping[str, Any]
) -> Resolved:
    """Decide for a configuration that is complete, except perhaps for its facts."""
    problems = []
    if settings:
        named = ", ".join(f"{name}=" for name in settings)
        problems.append(
            Problem(
                "error",
                f"{named} cannot be given next to an EngineConfig, which has every setting",
                remedy="set it in the EngineConfig, or pass the model instead",
                setting=named,
            )
        )
    plugins = config.plugins
    host = host or PluginHost.discover(
        plugins=plugins.plugins,
        allowed=plugins.allowed_plugins,
        strict=plugins.strict_plugins,
        plugins_setting=config.where("plugins"),
        allowed_setting=config.where("allowed_plugins"),
    )
    if config.facts is None:
        found = _find_model(config.model.model, config.where("model"), problems)
        facts = found and _facts(found, host, problems, strict=plugins.strict_plugins)
        config = config.model_copy(update={"facts": facts})
    if config.facts is None or _has_error(problems):
        return Resolved(None, host, _undecided(host, problems, config.facts))
    problems += _setting_problems(config, host)
    return _decided(config, host, problems)


def _decided(
    config: EngineConfig,
    host: PluginHost,
    problems: list[Problem],
    found: ModelReference | None = None,
) -> Resolved:
    """Decide, and write the decision down where that was asked for."""
    path = config.observability.log_json
    if path is None:
        return Resolved(config, host, decide_config(config, host, problems=problems), found)
    from runnerctl.engine.journal import Journal

    journal = None
    try:
        journal = Journal(path, config.where("log_json"))
    except UserError as error:
        problems.append(Problem("error", error.message, error.remedy, error.setting))
    decision = decide_config(config, host, problems=problems)
    if journal is not None:
        journal.decision(config.model.model, decision)
    return Resolved(config, host, decision, found)


def _read_settings(
    arguments: Mapping[str, Any],
    source: ArgumentSource,
    config_file: str | Path | None,
    environ: Mapping[str, str] | None,
) -> Settings:
    return resolve_settings(
        arguments,
        source=source,
        config_file=None if config_file is None else Path(config_file),
        environ=os.environ if environ is None else environ,
    )


def _discover(given: Settings) -> PluginHost:
    return PluginHost.discover(
        plugins=given.values.get("plugins", ()),
        allowed=given.values.get("allowed_plugins"),
        strict=given.values.get("strict_plugins", False),
        plugins_setting=_where(given, "plugins"),
        allowed_setting=_where(given, "allowed_plugins"),
    )


def _where(given: Settings, name: str) -> str:
    return given.origins.get(name, Origin("default", flag(name))).setting


def _find_model(
    model: str | Path | Mapping[str, Any] | None, setting: str, problems: list[Problem]
) -> ModelReference | None:
    """Where the model is, with its config; None after adding a problem."""
    from runnerctl.config import model_reference

    if model is None:
        problems.append(
            Problem(
                "error",
                "no model is given",
                remedy="name a folder, a config.json or GGUF file, a named model or a hub id",
                setting=setting,
            )
        )
        return None
    try:
        return model_reference.read_model_config(model)
    except UserError as exc:
        where = setting if exc.setting in (None, model_reference.SETTING) else exc.setting
        problems.append(Problem("error", exc.message, exc.remedy, where))
        return None


def _facts(
    found: ModelReference, host: PluginHost, problems: list[Problem], *, strict: bool
) -> ModelFacts:
    """What plugins say of the model, and else what its config says; faults become problems."""
    supplied, faults = host.model_facts(found.config, strict=strict)
    facts, contradictions = merge_facts(found.facts(known_facts(supplied)), supplied)
    problems += [*faults, *contradictions]
    return facts


def _named_as_written(problems: Iterable[Problem], given: Settings) -> list[Problem]:
    """Problems with plugin options, with the setting spelled as the user wrote it."""
    written = {}
    for plugin, keys in given.option_origins.items():
        for key, origin in keys.items():
            written[f"plugin_options.{plugin}.{key}"] = origin.setting
            written.setdefault(f"plugin_options.{plugin}", origin.setting)
    return [replace(p, setting=written.get(p.setting or "", p.setting)) for p in problems]


def _setting_problems(config: EngineConfig, host: PluginHost) -> list[Problem]:
    """What is wrong with the settings whatever the runner: a length, a backend's name."""
    problems = []
    length = config.model.max_model_len
    context = config.facts.max_position_embeddings if config.facts else None
    if length is not None and context is not None and length > context:
        where = config.where("max_model_len")
        problems.append(
            Problem(
                "error",
                f"{where} is {length}, more than the context of {config.model.model}, "
                f"which is {context} tokens",
                remedy=f"set it to {context} or less, or leave it out",
                setting=where,
            )
        )
    backends, where = host.attention_backends, config.where("attention_backend")
    try:
        check_backend_name(config.runner.attention_backend, backends, where)
    except UserError as error:
        problems.append(Problem("error", error.message, error.remedy, error.setting))
    if problem := unavailable_backend(config, backends):
        problems.append(problem)
    problems += parallel_problems(config)
    return problems


def _has_error(problems: Iterable[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


def _undecided(host: PluginHost, problems: Iterable[Problem], facts: ModelFacts | None) -> Decision:
    """The Decision when there is no configuration that one could decide about."""
    return Decision(
        runner=None,
        problems=(*problems, *host.problems),
        facts=facts,
        capabilities={name: tuple(sorted(s.capabilities)) for name, s in host.runners.items()},
        plugins=host.records,
    )
