"""`runnerctl config show`: every setting as it is, and where it was made."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runnerctl.cli.completion import models
from runnerctl.cli.flags import MODEL_HELP
from runnerctl.cli.guard import USERS_FAULT, stdout_is_unicode

if TYPE_CHECKING:
    from runnerctl.config.engine_config import Origin
    from runnerctl.problems import Problem


class ConfigFormat(StrEnum):
    """How the configuration is printed."""

    table = "table"
    json = "json"
    yaml = "yaml"


@dataclass(frozen=True, slots=True)
class Shown:
    """A value, the kind of place it came from, and how it was spelled there."""

    value: Any
    source: str
    setting: str


@dataclass(frozen=True, slots=True)
class ShownConfig:
    """The settings by name, the options of active plugins, and what is wrong with either."""

    settings: Mapping[str, Shown]
    plugin_options: Mapping[str, Mapping[str, Shown]]
    problems: tuple[Problem, ...]


def show_config(
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    model: Annotated[
        str | None, typer.Argument(help=MODEL_HELP, metavar="MODEL", autocompletion=models)
    ] = None,
    output: Annotated[
        ConfigFormat,
        typer.Option(
            "--format",
            metavar="table|json|yaml",
            help="A table to read, JSON, or a file for --config.",
        ),
    ] = ConfigFormat.table,
) -> None:
    """Show every setting with the place it came from.

    The model is not looked at: `validate` does that. Exits with 2 if a setting is wrong;
    it has its default here then.
    """
    shown = read_config({**settings, "model": model}, config_file, os.environ)
    if output is ConfigFormat.table:
        _show_table(shown)
    elif output is ConfigFormat.json:
        print(json.dumps(asdict(shown), indent=2))
    else:
        print(as_yaml(shown), end="")
    if shown.problems:
        from runnerctl.cli.render import problem_list, show

        show(problem_list(shown.problems), stderr=True)
    if any(problem.severity == "error" for problem in shown.problems):
        raise typer.Exit(USERS_FAULT)


def read_config(
    arguments: Mapping[str, Any], config_file: Path | None, environ: Mapping[str, str]
) -> ShownConfig:
    """Every setting and plugin option under some flags, a file and some variables."""
    from runnerctl.config.engine_config import Origin, flag
    from runnerctl.config.fields import setting_fields
    from runnerctl.config.settings import resolve_settings
    from runnerctl.resolve import discover_host

    given = resolve_settings(
        arguments, source="command line", config_file=config_file, environ=environ
    )
    host, problems = discover_host(
        source="command line", config_file=config_file, environ=environ, **arguments
    )
    settings = {
        name: _shown(
            given.values.get(name, setting.default),
            given.origins.get(name, Origin("default", flag(name))),
        )
        for name, setting in setting_fields().items()
    }
    options, _ = host.validated_options(given.plugin_options)
    plugin_options = {
        plugin: {
            key: _shown(
                value,
                given.option_origins.get(plugin, {}).get(
                    key, Origin("default", f"--plugin-option {plugin}.{key}")
                ),
            )
            for key, value in chosen.model_dump(mode="json", fallback=str).items()
        }
        for plugin, chosen in options.items()
    }
    return ShownConfig(settings, plugin_options, problems)


def _shown(value: Any, origin: Origin) -> Shown:
    return Shown(list(value) if isinstance(value, tuple) else value, origin.source, origin.setting)


def as_yaml(shown: ShownConfig) -> str:
    """A file for `--config` that says the same, with the sources as comments."""
    lines = [_yaml_line(name, item) for name, item in shown.settings.items()]
    if shown.plugin_options:
        lines.append("plugin_options:")
    for plugin, options in shown.plugin_options.items():
        lines.append(f"  {_yaml_value(plugin)}:{'' if options else ' {}'}")
        lines += [f"    {_yaml_line(key, item)}" for key, item in options.items()]
    return "\n".join(lines) + "\n"


def _yaml_line(name: str, item: Shown) -> str:
    return f"{name}: {_yaml_value(item.value)}  # {_place(item)}"


def _yaml_value(value: Any) -> str:
    """On one line, whatever it is: as the only item of a list, less the brackets."""
    import yaml

    text = yaml.safe_dump(
        [value], default_flow_style=True, allow_unicode=stdout_is_unicode(), width=math.inf
    )
    return text.strip()[1:-1]


def _place(item: Shown) -> str:
    return "default" if item.source == "default" else " ".join(item.setting.split())


def _show_table(shown: ShownConfig) -> None:
    from rich.table import Table
    from rich.text import Text

    from runnerctl.cli.render import show

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("SETTING", no_wrap=True)
    table.add_column("VALUE", overflow="fold")
    table.add_column("FROM", overflow="fold")
    rows = list(shown.settings.items())
    for plugin, options in shown.plugin_options.items():
        rows += [(f"{plugin}.{key}", item) for key, item in options.items()]
    for name, item in rows:
        style = "dim" if item.source == "default" else "bold"
        table.add_row(name, Text(table_value(item.value), style), Text(_place(item), style))
    show(table)


def table_value(value: Any) -> str:
    """A value for a person: on, off, a list of words, - for none."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else str(value)
