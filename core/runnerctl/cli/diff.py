"""`explain --diff`: two configurations side by side, and of each only what differs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from runnerctl.cli import render
from runnerctl.cli.config import ShownConfig, read_config, table_value
from runnerctl.cli.words import merged, parse_words
from runnerctl.decision import Decision
from runnerctl.selection_messages import says

_FLAG = "--diff"
_LONG = ("needs", "ballots", "problems")  # topics whose values are sentences


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: what was set, and what was decided."""

    model: str | None
    config: ShownConfig
    decision: Decision


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that differs. None: this side does not have it."""

    name: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """The two outcomes, which are always shown, and the rows by topic."""

    left: Mapping[str, Any]
    right: Mapping[str, Any]
    rows: Mapping[str, list[Row]]

    def to_json(self) -> str:
        """An object with `left`, `right` and a list of `{name, left, right}` for each topic."""
        topics = {topic: [asdict(row) for row in rows] for topic, rows in self.rows.items()}
        return json.dumps({"left": self.left, "right": self.right, **topics}, indent=2)


def side(model: str | None, settings: dict[str, Any], config_file: Path | None) -> Side:
    """Decide under some flags."""
    from runnerctl.resolve import resolve

    resolved = resolve(model, source="command line", config_file=config_file, **settings)
    config = read_config({**settings, "model": model}, config_file, os.environ)
    named = config.settings["model"].value
    return Side(named, config, resolved.decision)


def other_side(
    model: str | None, settings: dict[str, Any], config_file: Path | None, words: str
) -> Side:
    """Decide under the same flags with `words` added: those win, and repeatable ones add up.

    Raises:
        UserError: `words` are no model and flags.
    """
    other = parse_words(words, _FLAG)
    added = merged(settings, other.settings)
    return side(other.model or model, added, other.config_file or config_file)


def compare(left: Side, right: Side) -> Difference:
    """What differs, by topic, in the order it is shown in."""
    topics = {
        "settings": (_settings(left.config), _settings(right.config)),
        "facts": (_facts(left.decision), _facts(right.decision)),
        "needs": (_needs(left.decision), _needs(right.decision)),
        "ballots": (_ballots(left.decision), _ballots(right.decision)),
        "problems": (_problems(left.decision), _problems(right.decision)),
        "plugins": (_plugins(left.decision), _plugins(right.decision)),
    }
    rows = {topic: _differing(*both) for topic, both in topics.items()}
    rows["settings"] = [row for row in rows["settings"] if _says_something(row)]
    return Difference(_outcome(left), _outcome(right), rows)


def _says_something(row: Row) -> bool:
    """Not so if only the place differs, or an option that nobody set went with its plugin."""
    sides = [item for item in (row.left, row.right) if item is not None]
    if len(sides) == 1:
        return bool(sides[0]["source"] != "default")
    return bool(sides[0]["value"] != sides[1]["value"])


def _differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Row]:
    names = [*left, *(name for name in right if name not in left)]
    return [
        Row(name, left.get(name), right.get(name))
        for name in names
        if left.get(name) != right.get(name)
    ]


def _outcome(one: Side) -> dict[str, Any]:
    return {
        "model": one.model,
        "runner": one.decision.runner,
        "ok": one.decision.ok,
        "outcome": render.outcome(one.decision, one.model),
        "reason": render.reason(one.decision),
    }


def _settings(config: ShownConfig) -> dict[str, Any]:
    options = {
        f"{plugin}.{key}": asdict(item)
        for plugin, items in config.plugin_options.items()
        for key, item in items.items()
    }
    return {name: asdict(item) for name, item in config.settings.items()} | options


def _facts(decision: Decision) -> dict[str, Any]:
    if decision.facts is None:
        return {}
    facts = asdict(decision.facts)
    # where a fact was read is no fact
    return {n: value for n, value in facts.items() if n not in ("evidence", "supplied_by")}


def _needs(decision: Decision) -> dict[str, Any]:
    return {need.capability: need.reason for need in decision.needs}


def _ballots(decision: Decision) -> dict[str, Any]:
    return _numbered(
        (
            says(b),
            {"status": b.status, "overridden_by": b.overridden_by, "priority": b.priority}
            | {"reason": b.reason},
        )
        for b in render.in_reading_order(decision.ballots)
    )


def _problems(decision: Decision) -> dict[str, Any]:
    return _numbered(
        (" ".join(filter(None, (p.severity, p.setting or p.plugin))), p.message)
        for p in decision.problems
    )


def _plugins(decision: Decision) -> dict[str, Any]:
    return _numbered(
        (p.name, {"status": p.status, "version": f"{p.distribution} {p.version}", "error": p.error})
        for p in decision.plugins
    )


def _numbered(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dict in which a name that comes again has a number."""
    found: dict[str, Any] = {}
    for name, value in items:
        unique, number = name, 1
        while unique in found:
            number += 1
            unique = f"{name} ({number})"
        found[unique] = value
    return found


def report(difference: Difference, words: str) -> RenderableType:
    """For a person: the outcomes, then a block for each topic in which something differs."""
    outcomes = [Row(f"As given, with {words!r} on the right", difference.left, difference.right)]
    parts: list[RenderableType] = [_stacked(outcomes, "outcome")]
    for topic, rows in difference.rows.items():
        if rows:
            block = _stacked(rows, topic) if topic in _LONG else _columns(rows, topic)
            indented = Padding(block, (0, 0, 0, 2))
            parts += ["", Text(topic.capitalize(), "bold"), indented]
    if not any(difference.rows.values()):
        parts += ["", "Nothing differs."]
    return Group(*parts)


def _columns(rows: list[Row], topic: str) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("left", overflow="fold")
    table.add_column("right", overflow="fold")
    for row in rows:
        table.add_row(row.name, *(Text(_text(value, topic)) for value in (row.left, row.right)))
    return table


def _stacked(rows: list[Row], topic: str) -> RenderableType:
    """One under the other: sentences would be hard to read in half the width."""
    blocks: list[RenderableType] = []
    for row in rows:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, width=5)
        table.add_column(overflow="fold")
        table.add_row(Text("left", "dim"), Text(_text(row.left, topic)))
        table.add_row(Text("right", "dim"), Text(_text(row.right, topic)))
        name = Text(row.name, no_wrap=True, overflow="ignore")  # whole, to be copied
        blocks += [name, Padding(table, (0, 0, 0, 2))]
    return Group(*blocks)


def _text(value: Any, topic: str) -> str:
    if value is None:
        return "-"
    if topic == "outcome":
        return f"{value['outcome']} {value['reason']}".strip()
    if topic == "settings":
        shown = table_value(value["value"])
        return shown if value["source"] == "default" else f"{shown} ({value['setting']})"
    if topic == "ballots":
        by = f" by {value['overridden_by']}" if value["overridden_by"] else ""
        return f"{value['status']}{by}: {value['reason']}"
    if topic == "plugins":
        return f"{value['status']} ({value['error'] or value['version']})"
    return table_value(value)
