"""A matrix for a person, for a document and for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from runnerctl.cli.render import outcome, problem_list, reason
from runnerctl.errors import UserError
from runnerctl.suggest import did_you_mean

if TYPE_CHECKING:
    from runnerctl.decision import Decision
    from runnerctl.matrix import Matrix, Row

REFUSED = "refused"
# In the order in which runners come: readable on light and on dark.
_LONGEST = 24
_STYLES = ("cyan", "green", "magenta", "blue", "yellow")


def says(decision: Decision) -> str:
    """What a cell shows: the runner, or that the configuration is refused."""
    return decision.runner or REFUSED if decision.ok else REFUSED


def runners_of(matrix: Matrix) -> list[str]:
    """The runners that serve anything in it, by name."""
    cells = {says(d) for row in matrix.rows for d in row.decisions.values()}
    return sorted(cells - {REFUSED})


def table(matrix: Matrix) -> RenderableType:
    """A row for each model, its kind, and a word for each configuration.

    Lines that are too long for the terminal stay whole: a table is read by its columns.
    """
    styles = {n: _STYLES[i % len(_STYLES)] for i, n in enumerate(runners_of(matrix))}
    styles[REFUSED] = "red"
    columns = [[("MODEL", "bold"), *((_short(row.name), "") for row in matrix.rows)]]
    columns.append([("KIND", "bold"), *((row.kind, "dim") for row in matrix.rows)])
    for column in matrix.columns:
        cells = [says(row.decisions[column.name]) for row in matrix.rows]
        columns.append([(column.name, "bold"), *((cell, styles[cell]) for cell in cells)])
    widths = [max(len(text) for text, _ in cells) for cells in columns]
    lines = []
    for line in zip(*columns, strict=True):
        text = Text(no_wrap=True, overflow="ignore")
        for (said, style), width in zip(line, widths, strict=True):
            text.append(said.ljust(width + 2), style)
        lines.append(text)
    return Group(*lines, Text(f"\n{_hint(matrix)}", "dim"))


def _short(name: str) -> str:
    """A path by its end, so that there is room for the cells."""
    return name if len(name) <= _LONGEST else f"...{name[3 - _LONGEST :]}"


def _hint(matrix: Matrix) -> str:
    """How to ask why, by an example that needs asking if there is one."""
    refused = [r.name for r in matrix.rows if REFUSED in map(says, r.decisions.values())]
    name = (refused or [row.name for row in matrix.rows])[0]
    column = matrix.columns[0].name
    return f"Reasons: add --why {quote(name)}, or --why {quote(f'{name},{column}')} for one cell."


def markdown(matrix: Matrix, extra: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """The same as a table for a document.

    Args:
        matrix: what to show.
        extra: more columns by title, each a text by the row's name.
    """
    more = extra or {}
    titles = ["model type", "kind", *(column.name for column in matrix.columns), *more]
    lines = [_line(titles), _line(["---"] * len(titles))]
    for row in matrix.rows:
        cells = [says(row.decisions[column.name]) for column in matrix.columns]
        added = [texts.get(row.name, "") for texts in more.values()]
        lines.append(_line([f"`{row.name}`", row.kind, *cells, *added]))
    return "\n".join(lines)


def plain(matrix: Matrix, why: Sequence[str] = ()) -> dict[str, Any]:
    """The whole of it, reasons included, as what JSON can hold.

    Args:
        matrix: what to show.
        why: only these rows and cells, as `ROW` or `ROW,COLUMN`; none for all.

    Raises:
        UserError: there is no such row or column.
    """
    wanted = [_find(matrix, one) for one in why] or [
        (row, [column.name for column in matrix.columns]) for row in matrix.rows
    ]
    return {
        "columns": [{"name": c.name, "flags": c.flags} for c in matrix.columns],
        "rows": [_plain_row(row, columns) for row, columns in wanted],
    }


def _plain_row(row: Row, columns: Sequence[str]) -> dict[str, Any]:
    facts = row.facts
    return {
        "name": row.name,
        "model_type": facts.model_type if facts else "",
        "architectures": list(facts.architectures) if facts else [],
        "kind": row.kind,
        "cells": [
            {
                "column": name,
                "runner": row.decisions[name].runner,
                "ok": row.decisions[name].ok,
                "outcome": outcome(row.decisions[name], row.name),
                "reason": reason(row.decisions[name]),
                "problems": [asdict(p) for p in row.decisions[name].problems],
            }
            for name in columns
        ],
    }


def reasons(matrix: Matrix, why: Sequence[str]) -> RenderableType:
    """Why some rows or cells are as they are; columns that say the same are taken together.

    Raises:
        UserError: there is no such row or column.
    """
    parts: list[RenderableType] = []
    for row, columns in [_find(matrix, one) for one in why]:
        head = Text(row.name, "bold")
        head.append(f", {row.kind}", "not bold dim")
        parts += [head] if not parts else ["", head]
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name in columns:
            decision = row.decisions[name]
            key = (says(decision), reason(decision), decision.problems)
            groups.setdefault(key, []).append(name)
        for names in groups.values():
            decision = row.decisions[names[0]]
            parts += [Padding(_cell(decision, row.name, names), (0, 0, 0, 2))]
    return Group(*parts)


def _cell(decision: Decision, name: str, columns: Sequence[str]) -> RenderableType:
    said = Text(f"{', '.join(columns)}: ", "bold")
    said.append(outcome(decision, name), "green" if decision.ok else "red")
    if why := reason(decision):
        said.append(f" {why}", "not bold")
    parts: list[RenderableType] = [said]
    if decision.problems:
        parts.append(Padding(problem_list(decision.problems), (0, 0, 0, 2)))
    return Group(*parts)


def _find(matrix: Matrix, wanted: str) -> tuple[Row, list[str]]:
    """The row and the columns that a `ROW` or `ROW,COLUMN` means, case aside."""
    rows = {alias.casefold(): row for row in reversed(matrix.rows) for alias in _aliases(row)}
    columns = {column.name.casefold(): column.name for column in matrix.columns}
    whole = wanted.strip()
    if whole.casefold() in rows:
        return rows[whole.casefold()], list(columns.values())
    name, comma, column = (part.strip() for part in whole.rpartition(","))
    row = rows.get(name.casefold())
    if row and column.casefold() in columns:
        return row, [columns[column.casefold()]]
    if row:
        raise UserError(
            f"no column is called {column!r}{did_you_mean(column, columns.values())}",
            remedy=f"columns that are there: {', '.join(columns.values())}",
            setting="--why",
        )
    name = name if comma else whole
    raise UserError(
        f"no row is called {name!r}{did_you_mean(name, [row.name for row in matrix.rows])}",
        remedy="`runnerctl matrix` shows the rows; name other models as arguments",
        setting="--why",
    )


def _aliases(row: Row) -> tuple[str, ...]:
    """The names a row goes by; its own first."""
    return (*(row.facts.architectures if row.facts else ()), row.name)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
