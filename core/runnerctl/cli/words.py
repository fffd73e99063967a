"""Words of a command line given as the value of a flag: `--diff`, `--column`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import typer

from runnerctl.cli.flags import engine_flags
from runnerctl.errors import UserError

_REPEATABLE = ("plugins", "plugin_options")
_MODEL: Any = typer.Argument(None)


class Words(NamedTuple):
    """What `explain` would have got: a model, settings by name (None: not given), a file."""

    model: str | None
    settings: dict[str, Any]
    config_file: Path | None


def parse_words(text: str, flag: str) -> Words:
    """Read `text` as `explain` would.

    Args:
        text: a model, flags of settings, or both.
        flag: what it was the value of, for messages.

    Raises:
        UserError: it is something else.
    """
    parsed: list[Words] = []

    def explain(
        *, settings: dict[str, Any], config_file: Path | None, model: str | None = _MODEL
    ) -> None:
        parsed.append(Words(model, settings, config_file))

    app = typer.Typer(add_completion=False, context_settings={"help_option_names": []})
    app.command()(engine_flags(explain))
    try:
        arguments = shlex.split(text)
        typer.main.get_command(app).main(args=arguments, prog_name=flag, standalone_mode=False)
    except ValueError as exc:
        raise UserError(f"{flag} {text!r} cannot be split into words: {exc}") from exc
    except Exception as exc:
        # typer brings its own copy of click, or uses the one installed: no class to name
        if not hasattr(exc, "format_message"):
            raise
        remedy = "give what you would give to explain: a model, flags of settings, or both"
        raise UserError(f"{flag}: {exc.format_message()}", remedy=remedy) from exc
    return parsed[0]


def merged(settings: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Settings with others on top: those win, and repeatable ones add up."""
    found = dict(settings)
    for name, value in added.items():
        if value is not None:
            both = [*(settings.get(name) or ()), *value] if name in _REPEATABLE else value
            found[name] = both
    return found
