"""`runnerctl matrix`: which runner serves which architecture under which configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runnerctl.cli.completion import rows
from runnerctl.cli.words import merged, parse_words
from runnerctl.errors import UserError
from runnerctl.suggest import did_you_mean

if TYPE_CHECKING:
    from runnerctl.matrix import Column, Matrix


class MatrixFormat(StrEnum):
    """How the table is printed."""

    table = "table"
    json = "json"
    markdown = "markdown"


_Models = Annotated[
    list[str] | None,
    typer.Argument(
        help="The rows: model types (llama, jamba ...), folders, config.json or GGUF files, "
        "hub ids. Default: well-known model types.",
        metavar="MODEL",
        autocompletion=rows,
        show_default=False,
    ),
]
_Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="'[NAME:] FLAGS'",
        help="One more column: flags as for explain. Repeatable.",
        show_default=False,
    ),
]
_Why = Annotated[
    list[str] | None,
    typer.Option(
        "--why",
        metavar="ROW[,COLUMN]",
        help="Print the reasons of a row or a cell instead of the table. Repeatable.",
        show_default=False,
    ),
]
_Format = Annotated[
    MatrixFormat,
    typer.Option(
        "--format",
        metavar="table|json|markdown",
        help="A table to read, JSON with all reasons, or a table for a document.",
    ),
]
_Picture = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Draw the table, too.")
]


def matrix(
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    model: _Models = None,
    column: _Columns = None,
    why: _Why = None,
    output: _Format = MatrixFormat.table,
    svg: _Picture = None,
) -> None:
    """Show which runner would serve many models under many configurations.

    Each cell is what explain would say: the runner, or that none serves. Flags of settings
    hold for every column.
    """
    from runnerctl.cli.matrix_render import markdown, plain, reasons, table
    from runnerctl.cli.render import problem_list, show

    found = make_matrix(model or [], column or [], settings, config_file)
    if svg is not None:
        _write(svg, found)
    if output is MatrixFormat.json:
        print(json.dumps(plain(found, why or []), indent=2))
    elif why:
        show(reasons(found, why))
    elif output is MatrixFormat.markdown:
        print(markdown(found))
    else:
        show(table(found))
    if found.problems:
        show(problem_list(found.problems), stderr=True)


def make_matrix(
    names: list[str], columns: list[str], settings: dict[str, Any], config_file: Path | None
) -> Matrix:
    """Decide about the models named, or about well-known ones.

    Args:
        names: model types of `families()`, or what `explain` takes.
        columns: `--column` as written.
        settings, config_file: for every column.

    Raises:
        UserError: a model, a column or a setting is wrong.
    """
    from runnerctl.matrix import Column, build_matrix, check, default_columns, families
    from runnerctl.resolve import discover_host

    def make(name: str, flags: str) -> Column:
        words = parse_words(flags, f"--column {name!r}")
        if words.model is not None:
            raise UserError(
                f"--column {name!r} names a model, {words.model!r}",
                remedy="models are rows: name them as arguments",
            )
        added = merged(settings, words.settings)
        return Column(name, flags, added, words.config_file or config_file)

    known = families()
    models = {name: _model(name, known) for name in names or known}
    host, problems = discover_host(source="command line", config_file=config_file, **settings)
    check(problems)
    made = list(default_columns(make, host.runners))
    for spec in columns:
        name, flags = _named(spec)
        if name in [one.name for one in made]:
            raise UserError(
                f"two columns are called {name!r}",
                remedy="give it another name: --column 'NAME: FLAGS'",
                setting="--column",
            )
        made.append(make(name, flags))
    return build_matrix(models, made)


def _model(name: str, known: Mapping[str, Mapping[str, Any]]) -> str | Mapping[str, Any]:
    """What is on disk goes before a model type, and that before what `explain` takes."""
    from runnerctl.config.model_reference import named_models

    if Path(name).exists() or name not in known:
        is_name = not Path(name).exists() and name not in named_models()
        if is_name and re.fullmatch(r"\w+", name):
            raise UserError(
                f"{name!r} is no model type, folder, file or named model"
                f"{did_you_mean(name, known)}",
                remedy="`runnerctl matrix` shows the model types that are known by name",
                setting="MODEL",
            )
        return name
    return known[name]


def _named(spec: str) -> tuple[str, str]:
    """Name and flags of `NAME: FLAGS`; flags alone are their own name."""
    name, colon, flags = spec.partition(":")
    if colon and not name.lstrip().startswith("-"):
        return name.strip() or flags.strip(), flags.strip()
    return spec.strip(), spec.strip()


def _write(path: Path, found: Matrix) -> None:
    from runnerctl.cli.matrix_svg import drawing

    try:
        path.write_text(drawing(found), encoding="utf-8")
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise UserError(f"{path} cannot be written: {reason}", setting="--svg") from exc
