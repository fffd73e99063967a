"""The flags of `SamplingParams`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from runnerctl.cli.guard import with_parameters
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.errors import UserError

# field -> type, default, metavar, help. An answer of 16 tokens, the default of the library,
# would look broken in a terminal; and the same command is to give the same answer.
_FLAGS: dict[str, tuple[Any, Any, str | None, str]] = {
    "max_tokens": (int, 256, "INTEGER", "Tokens to generate at most."),
    "temperature": (float, 0.0, "NUMBER", "0 always takes the most likely token."),
    "top_k": (int, 0, "INTEGER", "Choose among the k most likely tokens; 0: among all."),
    "top_p": (float, 1.0, "NUMBER", "Choose among the likeliest that add up to this share."),
    "seed": (int | None, None, "INTEGER", "The same seed gives the same answer."),
    "stop": (list[str] | None, None, "TEXT", "Text that ends the answer. Repeatable."),
    "ignore_eos": (bool, False, None, "Go on past the model's end-of-text tokens."),
}


def sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the sampling flags to a command, which gets `params`, a `SamplingParams`."""
    flags = []
    for name, (annotation, default, metavar, text) in _FLAGS.items():
        option = typer.Option(
            default, _flag(name), metavar=metavar, help=text, rich_help_panel="Sampling"
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        flags.append(inspect.Parameter(name, kind, default=option, annotation=annotation))

    @wraps(command)
    def wrapper(**arguments: Any) -> None:
        command(params=_params({name: arguments.pop(name) for name in _FLAGS}), **arguments)

    own = inspect.signature(command, eval_str=True).parameters.values()
    return with_parameters(wrapper, [*(p for p in own if p.name != "params"), *flags])


def _params(values: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except UserError as exc:
        if exc.setting is None:
            raise
        flag = _flag(exc.setting)
        message = exc.message.replace(exc.setting, flag, 1)
        raise UserError(message, remedy=exc.remedy, setting=flag) from exc


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
