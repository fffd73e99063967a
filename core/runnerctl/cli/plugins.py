"""`runnerctl plugins ...`: which plugins take part, and what became of the others."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from runnerctl.cli.flags import Format
from runnerctl.cli.guard import USERS_FAULT

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
    if problems:
        from runnerctl.cli.render import problem_list, show

        show(problem_list(problems), stderr=True)
    if any(problem.severity == "error" for problem in problems):
        raise typer.Exit(USERS_FAULT)
