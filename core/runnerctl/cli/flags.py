"""The flags of every engine setting, made from the sections of `EngineConfig`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from runnerctl.cli.completion import completer
from runnerctl.cli.guard import with_parameters
from runnerctl.config.engine_config import SECTIONS, flag
from runnerctl.config.fields import SettingField, setting_fields

MODEL_HELP = "A folder, a config.json or GGUF file, a named model, or a hub id."


class Format(StrEnum):
    """How a command prints what it found."""

    table = "table"
    json = "json"


_METAVARS = {
    "integer": "INTEGER",
    "bytes": "BYTES",
    "text": "NAME",
    "path": "PATH|-",
    "names": "NAMES",
}


def engine_flags(
    command: Callable[..., None], sections: Collection[str] = frozenset(SECTIONS)
) -> Callable[..., None]:
    """Add a flag for every setting of some sections to a command.

    `command` gets them as `settings`, a dict by field name in which None means not
    given, together with `config_file`. The values are text as written: `resolve_settings`
    validates them as it does those of every other source.
    """
    flags = [
        _flag(setting)
        for setting in setting_fields().values()
        if setting.name != "model" and setting.section in sections
    ]
    names = [parameter.name for parameter in flags] + ["plugin_options"]

    @wraps(command)
    def wrapper(**arguments: Any) -> None:
        # an option that may be repeated is an empty list when it is not given
        settings = {name: _given(arguments.pop(name)) for name in names}
        command(settings=settings, **arguments)

    own = inspect.signature(command, eval_str=True).parameters.values()
    kept = [p for p in own if p.name not in ("settings", "config_file")]
    return with_parameters(wrapper, [*kept, *_file_and_options(), *flags])


def _given(value: Any) -> Any:
    return None if value in ([], ()) else value


def _flag(setting: SettingField) -> inspect.Parameter:
    spelled = [flag(setting.name)]
    annotation: Any = str | None
    metavar = "|".join(setting.choices) or _METAVARS.get(setting.kind)
    if setting.kind == "switch":
        annotation = bool | None
        spelled = [f"{spelled[0]}/--no-{spelled[0].removeprefix('--')}"]
    elif setting.name == "plugins":
        annotation = list[str] | None
        spelled, metavar = ["-p", "--plugin"], "[no:]NAME"
    elif setting.name == "runner":
        metavar = "auto|NAME"
    option = typer.Option(
        None,
        *spelled,
        help=_help(setting),
        metavar=metavar,
        rich_help_panel=_panel(setting.section),
        show_default=False,
        autocompletion=completer(setting.name, setting.choices),
    )
    return _parameter(setting.name, option, annotation)


def _help(setting: SettingField) -> str:
    if setting.default in (None, ()) or "Default:" in setting.help:
        return setting.help
    default = setting.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"{setting.help} Default: {default}."


def _panel(section: str) -> str:
    title = (SECTIONS[section].__doc__ or section).strip().splitlines()[0]
    return f"{section.capitalize()} ({title[0].lower()}{title[1:].rstrip('.')})"


def _file_and_options() -> list[inspect.Parameter]:
    file = typer.Option(
        None,
        "--config",
        metavar="FILE",
        help="YAML file of settings, named like the flags. Flags beat it; it beats RUNNERCTL_*.",
        rich_help_panel="Settings from elsewhere",
    )
    options = typer.Option(
        None,
        "--plugin-option",
        metavar="NAME.KEY=VALUE",
        help="Option of a plugin (`plugins options` lists them), the value in YAML: 3, true, text, "
        "[a, b]. Repeatable.",
        rich_help_panel="Settings from elsewhere",
        show_default=False,
    )
    return [
        _parameter("config_file", file, Path | None),
        _parameter("plugin_options", options, list[str] | None),
    ]


def _parameter(name: str, option: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )
