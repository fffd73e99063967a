"""`runnerctl explain` and `runnerctl validate`: the decision, without running anything."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from runnerctl.cli.completion import models
from runnerctl.cli.flags import MODEL_HELP
from runnerctl.cli.guard import USERS_FAULT, stdout_is_unicode
from runnerctl.decision import Decision
from runnerctl.errors import UserError

_Model = Annotated[
    str | None, typer.Argument(help=MODEL_HELP, metavar="MODEL", autocompletion=models)
]


class ExplainFormat(StrEnum):
    """How a decision is printed."""

    table = "table"
    json = "json"
    mermaid = "mermaid"


def explain(
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    model: _Model = None,
    output: Annotated[
        ExplainFormat,
        typer.Option(
            "--format",
            metavar="table|json|mermaid",
            help="A table to read, the decision as JSON, or a flowchart.",
        ),
    ] = ExplainFormat.table,
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff",
            metavar="'[MODEL] FLAGS'",
            help="Compare with the same command plus these words, which win.",
        ),
    ] = None,
) -> None:
    """Show which runner would serve MODEL, and who said what about it.

    Exits with 2 if something is wrong.
    """
    if diff is not None:
        _explain_difference(model, settings, config_file, diff, output)
        return
    decision = _decide(model, settings, config_file)
    if output is ExplainFormat.json:
        text = decision.to_json()
        print(text if stdout_is_unicode() else json.dumps(json.loads(text), indent=2))
    elif output is ExplainFormat.mermaid:
        from runnerctl.cli.mermaid import flowchart

        print(flowchart(decision, model))
    else:
        from runnerctl.cli.render import decision_report, show

        show(decision_report(decision, model))
    _exit(decision)


def _explain_difference(
    model: str | None,
    settings: dict[str, Any],
    config_file: Path | None,
    words: str,
    output: ExplainFormat,
) -> None:
    from runnerctl.cli import diff

    if output is ExplainFormat.mermaid:
        raise UserError("--diff has no flowchart", remedy="use --format table or json")
    left = diff.side(model, settings, config_file)
    right = diff.other_side(model, settings, config_file, words)
    difference = diff.compare(left, right)
    if output is ExplainFormat.json:
        print(difference.to_json())
    else:
        from runnerctl.cli.render import show

        show(diff.report(difference, words))
    _exit(left.decision)
    _exit(right.decision)


def validate(*, settings: dict[str, Any], config_file: Path | None, model: _Model = None) -> None:
    """Say what is wrong with the settings for MODEL, if anything is.

    Exits with 2 if something is wrong.
    """
    from runnerctl.cli.render import show, validation_report

    decision = _decide(model, settings, config_file)
    show(validation_report(decision, model))
    _exit(decision)


def _decide(model: str | None, settings: dict[str, Any], config_file: Path | None) -> Decision:
    from runnerctl.resolve import resolve

    return resolve(model, source="command line", config_file=config_file, **settings).decision


def _exit(decision: Decision) -> None:
    if not decision.ok:
        raise typer.Exit(USERS_FAULT)
