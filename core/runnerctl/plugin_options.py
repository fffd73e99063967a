"""The options that plugins declare, checked against what the user wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from runnerctl.decision import PluginRecord
from runnerctl.plugin_checks import GUARDED, explain
from runnerctl.plugin_discovery import fold
from runnerctl.problems import Problem
from runnerctl.suggest import did_you_mean

Raw = Mapping[str, Mapping[str, Any]]


def validated(
    raw: Raw, models: Mapping[str, type[BaseModel]], records: tuple[PluginRecord, ...]
) -> tuple[dict[str, BaseModel], list[Problem]]:
    """One options object per plugin that declares options, and what was wrong with `raw`.

    Where an option is wrong the plugin's other options stay, and the wrong one has its
    default.
    """
    given = {fold(name): values for name, values in raw.items()}
    problems = [
        problem
        for name in sorted(given)
        if name not in models and (problem := _no_options(name, models, records))
    ]
    options = {}
    for name, model in sorted(models.items()):
        options[name], wrong = _one(name, model, given.get(name, {}))
        problems += wrong
    return options, problems


def _no_options(
    name: str, models: Mapping[str, type[BaseModel]], records: tuple[PluginRecord, ...]
) -> Problem:
    setting = f"plugin_options.{name}"
    record = next((r for r in records if r.name == name), None)
    if record is None:
        known = [r.name for r in records]
        message = f"no plugin is called {name!r}{did_you_mean(name, known)}"
        return Problem("error", message, remedy="correct the name", setting=setting)
    if record.status != "active":
        message = f"plugin {name!r} is {record.status} ({record.error}); its options are not used"
        return Problem("warning", message, setting=setting)
    having = ", ".join(sorted(models)) or "none"
    message = f"plugin {name!r} has no options (plugins that have: {having})"
    return Problem("error", message, remedy="remove it", setting=setting)


def _one(
    name: str, model: type[BaseModel], values: Mapping[str, Any]
) -> tuple[BaseModel, list[Problem]]:
    problems = []
    known = set(model.model_fields)
    for key in sorted(set(values) - known):
        message = f"plugin {name!r} has no option {key!r}{did_you_mean(key, known)}"
        remedy = f"its options: {', '.join(sorted(known)) or 'none'}"
        problems.append(Problem("error", message, remedy, f"plugin_options.{name}.{key}"))
    accepted: dict[str, Any] = {}
    for key in sorted(set(values) & known):
        try:
            accepted[key] = _valid(model, key, values[key])
        except ValidationError as error:
            what = "; ".join(e["msg"] for e in error.errors())
            message = f"{values[key]!r} does not fit: {what}"
            problems.append(
                Problem("error", message, "correct the value", f"plugin_options.{name}.{key}")
            )
    try:
        return model.model_validate(accepted), problems
    except GUARDED as error:  # a validator over several fields, or a faulty one
        setting = f"plugin_options.{name}"
        problems.append(Problem("error", explain(error), "correct the values", setting))
        return model.model_construct(), problems


def _valid(model: type[BaseModel], key: str, value: Any) -> Any:
    """The value as given, or split at commas if it is text where the option takes a list."""
    try:
        model.model_validate({key: value})
    except ValidationError as error:
        listy = {"tuple_type", "list_type", "set_type", "frozen_set_type"}
        if not isinstance(value, str) or not any(e["type"] in listy for e in error.errors()):
            raise
        words = [word.strip() for word in value.split(",") if word.strip()]
        model.model_validate({key: words})
        return words
    return value
