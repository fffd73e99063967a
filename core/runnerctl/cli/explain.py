"""`runnerctl explain` and `runnerctl validate`: the decision, without running anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from runnerctl.cli.flags import MODEL_HELP, Format
from runnerctl.cli.guard import USERS_FAULT, stdout_is_unicode
from runnerctl.decision import Decision

_Model = Annotated[str | None, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
_Format = Annotated[
    Format,
    typer.Option(
        "--format", metavar="table|json", help="A table to read, or the decision as JSON."
    ),
]


def explain(
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    model: _Model = None,
    output: _Format = Format.table,
) -> None:
    """Show which runner would serve MODEL, and who said what about it.

    Exits with 2 if something is wrong.
    """
    decision = _decide(model, settings, config_file)
    if output is Format.json:
        text = decision.to_json()
        print(text if stdout_is_unicode() else json.dumps(json.loads(text), indent=2))
    else:
        from runnerctl.cli.render import decision_report, show

        show(decision_report(decision, model))
    _exit(decision)


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
