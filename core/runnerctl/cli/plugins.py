"""`runnerctl plugins ...`: which plugins take part, and what became of the others."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runnerctl.cli.completion import plugin_names
from runnerctl.cli.flags import Format
from runnerctl.cli.guard import USERS_FAULT

if TYPE_CHECKING:
    from pydantic import BaseModel

    from runnerctl.problems import Problem

_Format = Annotated[
    Format, typer.Option("--format", metavar="table|json", help="A table to read, or JSON.")
]


def list_plugins(
    settings: dict[str, Any], config_file: Path | None, output: _Format = Format.table
) -> None:
    """List every plugin that was found, and what became of it.

    Exits with 2 if a plugin is at fault and --strict-plugins is given.
    """
    from runnerctl.resolve import discover_plugins

    plugins, problems = discover_plugins(source="command line", config_file=config_file, **settings)
    if output is Format.json:
        print(json.dumps([asdict(plugin) for plugin in plugins], indent=2))
    else:
        from runnerctl.cli.render import plugin_table, show

        show(plugin_table(plugins))
    _report(problems)


def list_options(
    settings: dict[str, Any],
    config_file: Path | None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="PLUGIN", help="Only the options of this one.", autocompletion=plugin_names
        ),
    ] = None,
    output: _Format = Format.table,
) -> None:
    """List the options that plugins declare: --plugin-option PLUGIN.OPTION=VALUE.

    Exits with 2 if there is no such plugin.
    """
    from runnerctl.errors import UserError
    from runnerctl.plugin_discovery import fold
    from runnerctl.resolve import discover_host
    from runnerctl.suggest import did_you_mean

    host, problems = discover_host(source="command line", config_file=config_file, **settings)
    known = {record.name: record for record in host.records}
    if name is not None and fold(name) not in known:
        raise UserError(
            f"no plugin is called {name!r}{did_you_mean(name, known)}",
            remedy="`runnerctl plugins list` shows what is there",
            setting="PLUGIN",
        )
    wanted = host.options if name is None else {fold(name): host.options.get(fold(name))}
    records = [
        record
        for plugin, model in wanted.items()
        if model is not None
        for record in _option_records(plugin, model)
    ]
    if output is Format.json:
        print(json.dumps(records, indent=2))
    else:
        _show_options(records, name)
    _report(problems)


def _option_records(plugin: str, model: type[BaseModel]) -> list[dict[str, Any]]:
    defaults: Mapping[str, Any] = model().model_dump(mode="json", fallback=str)
    return [
        {
            "plugin": plugin,
            "option": option,
            "type": inspect.formatannotation(field.annotation),
            "default": defaults.get(option),
            "description": field.description or "",
        }
        for option, field in model.model_fields.items()
    ]


def _show_options(records: list[dict[str, Any]], name: str | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from runnerctl.cli.render import show

    if not records:
        show(f"{name} has no options." if name else "No plugin has options.")
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for record in records:
        text = Text(record["description"] + "\n" if record["description"] else "")
        default = json.dumps(record["default"], ensure_ascii=False)
        text.append(f"{record['type']}, default {default}", "dim")
        table.add_row(Text(f"{record['plugin']}.{record['option']}", "bold"), text)
    show(table)


def _report(problems: tuple[Problem, ...]) -> None:
    """What is wrong goes to stderr; an error ends with the exit code for it."""
    if problems:
        from runnerctl.cli.render import problem_list, show

        show(problem_list(problems), stderr=True)
    if any(problem.severity == "error" for problem in problems):
        raise typer.Exit(USERS_FAULT)
