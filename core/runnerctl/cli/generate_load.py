"""What `generate` and `chat` share: from flags to a loaded model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runnerctl.cli.completion import models
from runnerctl.cli.flags import MODEL_HELP
from runnerctl.cli.guard import USERS_FAULT
from runnerctl.errors import PromptError, UserError

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM
    from runnerctl.resolve import Resolved

DEFAULT_MODEL = "smollm2-135m"

ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model",
        help=f"{MODEL_HELP} Default: {DEFAULT_MODEL}.",
        metavar="MODEL",
        autocompletion=models,
    ),
]
SystemFlag = Annotated[
    str | None, typer.Option("--system", help="System message of the chat.", metavar="TEXT")
]


def as_unicode(text: str, what: str) -> str:
    """Text whose bytes Python could not read in the locale's encoding, read as UTF-8.

    Raises:
        PromptError: it is not UTF-8 either; calls it `what`.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as exc:
        raise PromptError(f"{what} is not UTF-8 text", remedy="convert it, with iconv say") from exc


def resolve_model(
    model: str | None,
    settings: dict[str, Any],
    config_file: Path | None,
    *,
    default: str | None = DEFAULT_MODEL,
    setting: str = "--model",
) -> Resolved:
    """Let the plugins choose, and say on stderr what came of it.

    Args:
        model, settings, config_file: as the user gave them.
        default: the model if none was given.
        setting: what the command calls the model in its usage.

    Raises:
        typer.Exit: the configuration cannot be served; stderr says why.
    """
    from runnerctl.resolve import resolve

    resolved = resolve(
        model,
        source="command line",
        config_file=config_file,
        default_model=default,
        **settings,
    )
    # MODEL is what the other commands call it
    problems = [
        replace(p, setting=setting if p.setting == "MODEL" else p.setting)
        for p in resolved.decision.problems
    ]
    decision = replace(resolved.decision, problems=tuple(problems))
    from runnerctl.cli import render

    named = resolved.config.model.model if resolved.config else model
    if not decision.ok:
        render.show(render.validation_report(decision, named), stderr=True)
        raise typer.Exit(USERS_FAULT)
    line = f"{render.outcome(decision, named)} {render.reason(decision)}"
    render.show(line, stderr=True)
    if warnings := [p for p in decision.problems if p.severity == "warning"]:
        render.show(render.problem_list(warnings), stderr=True)
    return resolved


def load(resolved: Resolved) -> LLM:
    """The model, ready to answer. Slow: imports torch and reads the weights.

    Raises:
        UserError: it is one that does not answer.
    """
    assert resolved.config is not None
    if resolved.config.facts is not None and resolved.config.facts.runner_type == "pooling":
        named = resolved.config.model.model
        evidence = resolved.config.facts.evidence.get("runner_type")
        raise UserError(
            f"{named} does not generate text: it is a pooling model"
            + (f" ({evidence})" if evidence else ""),
            remedy=f"runnerctl embed {named} TEXT (or classify) gives what it is for",
            setting="--model",
        )
    from runnerctl.engine.llm import LLM

    return LLM.from_resolved(resolved)


def note(text: str) -> None:
    """A line for the reader, on stderr, below what stdout has by now."""
    sys.stdout.flush()
    if sys.stderr.isatty():
        from runnerctl.cli.render import show

        show(text, stderr=True)  # breaks it between words
    else:
        print(text, file=sys.stderr, flush=True)
