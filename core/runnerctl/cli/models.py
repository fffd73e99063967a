"""`runnerctl models ...`: what is cached, fetching more, and making room."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runnerctl.cli.completion import cached, models
from runnerctl.cli.flags import Format
from runnerctl.cli.guard import OUR_FAULT
from runnerctl.errors import ModelError, UserError

if TYPE_CHECKING:
    from runnerctl.models.inventory import CachedModel

_MODELS_HELP = "A named model, or a hub id like org/name."


def list_models(
    output: Annotated[
        Format, typer.Option("--format", metavar="table|json", help="A table to read, or JSON.")
    ] = Format.table,
    check: Annotated[
        bool,
        typer.Option("--verify", help="Hash the weights, and compare with what was noted."),
    ] = False,
) -> None:
    """List the models on this machine: in our cache, and in the hub client's.

    Exits with 1 if --verify finds weights that changed.
    """
    from runnerctl.models import inventory

    found = [*inventory.own_models(), *inventory.hub_models()]
    checked = [
        inventory.verify(model) if check and model.kind != "unfinished" else None for model in found
    ]
    if output is Format.json:
        records = [_record(model, result) for model, result in zip(found, checked, strict=True)]
        print(json.dumps(records, indent=2))
    else:
        _show(found, checked)
    if any(result and result[0] == "differs" for result in checked):
        raise typer.Exit(OUR_FAULT)


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help=_MODELS_HELP, autocompletion=models)],
) -> None:
    """Fetch a model now, so that a later command finds it in the cache."""
    from runnerctl.config.model_reference import HUB_ID, ModelReference, named_models
    from runnerctl.engine.requirements import check_engine_installed
    from runnerctl.models.store import ensure_local

    named = named_models()
    if name in named:
        check_engine_installed()  # it is converted, too
        reference = ModelReference(name, "named", {}, manifest=named[name])
    elif HUB_ID.fullmatch(name) and not Path(name).exists():
        reference = ModelReference(name, "hub", {})
    else:
        is_local = Path(name).exists()
        what = "is on this machine already" if is_local else "is no named model and no hub id"
        raise ModelError(
            f"{name} {what}",
            remedy=f"give a hub id like org/name, or a named model: {', '.join(named)}",
            setting="NAME",
        )
    print(ensure_local(reference))


def rm(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="As `runnerctl models list` names it.", autocompletion=cached
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from our cache. A hub model is left to the hub's own client."""
    from runnerctl.models import inventory

    model = inventory.find_own(name)
    if not yes:
        if not _can_ask():
            raise UserError(
                f"removing {model.name} ({_size(model.size_bytes)}) has to be confirmed",
                remedy="pass --yes",
                setting="--yes",
            )
        question = f"Remove {model.name} ({_size(model.size_bytes)}) from {model.path}?"
        if not _is_yes(question):
            print("Nothing was removed.", file=sys.stderr)
            return
    inventory.remove(model)
    print(f"Removed {model.name}, {_size(model.size_bytes)}.")


def _can_ask() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _is_yes(question: str) -> bool:
    """Ask on stderr. Only yes is yes, and Ctrl-C is what it is to every other command."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")


def _record(model: CachedModel, checked: Any) -> dict[str, Any]:
    record = {**asdict(model), "path": str(model.path), "last_used": _when(model.last_used)}
    if checked is not None:
        record["verified"], record["weights_found"] = checked
    return record


def _show(found: list[CachedModel], checked: list[Any]) -> None:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from runnerctl.cli.render import show
    from runnerctl.models.cache import models_dir

    folder = models_dir()
    if not found:
        show(f"No models yet. The cache is {folder}.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("NAME", overflow="fold")
    for column in ("KIND", "SIZE", "LAST USED"):
        table.add_column(column, no_wrap=True)
    table.add_column("SHA256", overflow="fold")
    for model, result in zip(found, checked, strict=True):
        table.add_row(
            Text(model.name, "bold"),
            model.kind,
            _size(model.size_bytes),
            _when(model.last_used)[:10],
            Text("\n".join(filter(None, (_digest(model, result), model.note)))),
        )
    own = [model for model in found if model.kind != "hub"]
    total = _size(sum(model.size_bytes for model in own))
    lines = [f"{len(own)} in {folder}, {total}."]
    if len(own) < len(found):
        lines.append("hub: in the hub client's cache; `hf cache rm model/NAME` removes one there.")
    show(Group(table, "", *lines))


def _digest(model: CachedModel, checked: Any) -> str:
    """The start of the weights' sha256, and what `--verify` found."""
    verdict, weights = checked or ("", model.weights)
    if not weights:
        return "not noted" if model.kind in ("named", "gguf") else ""
    digests = list(weights.values())
    text = (
        digests[0][:12] if len(digests) == 1 else f"{digests[0][:12]} and {len(digests) - 1} more"
    )
    meaning = {"ok": ", as noted", "differs": ", NOT as noted", "no record": ", not noted before"}
    return text + meaning.get(verdict, "")


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
