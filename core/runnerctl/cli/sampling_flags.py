"""The flags of `SamplingParams`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import typer

from runnerctl.cli.guard import with_parameters
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.errors import UserError

# field -> type, default, metavar, help. An answer of 16 tokens, the default of the library,
# would look broken in a terminal; and the same command is to give the same answer.
_FLAGS: dict[str, tuple[Any, Any, str | None, str]] = {
    "n": (int, 1, "INTEGER", "Answers to each prompt."),
    "max_tokens": (int, 256, "INTEGER", "Tokens to generate at most."),
    "min_tokens": (int, 0, "INTEGER", "Tokens before the answer may end by itself."),
    "temperature": (float, 0.0, "NUMBER", "0 always takes the most likely token."),
    "top_k": (int, 0, "INTEGER", "Choose among the k most likely tokens; 0: among all."),
    "top_p": (float, 1.0, "NUMBER", "Choose among the likeliest that add up to this share."),
    "min_p": (float, 0.0, "NUMBER", "Drop tokens below this share of the likeliest one."),
    "repetition_penalty": (float, 1.0, "NUMBER", "Above 1 makes tokens that were there rarer."),
    "presence_penalty": (float, 0.0, "NUMBER", "Taken off tokens that are in the answer."),
    "frequency_penalty": (float, 0.0, "NUMBER", "Taken off for each time they are in it."),
    "logit_bias": (list[str] | None, None, "ID=BIAS", "Add to a token's logit. Repeatable."),
    "bad_words": (list[str] | None, None, "TEXT", "Text that is not to appear. Repeatable."),
    "bad_words_token_ids": (
        list[str] | None,
        None,
        "ID,ID",
        "Tokens that are not to appear in this order. Repeatable.",
    ),
    "seed": (int | None, None, "INTEGER", "The same seed gives the same answer."),
    "stop": (list[str] | None, None, "TEXT", "Text that ends the answer. Repeatable."),
    "stop_token_ids": (list[int] | None, None, "ID", "Token that ends the answer. Repeatable."),
    "ignore_eos": (bool, False, None, "Go on past the model's end-of-text tokens."),
    "skip_special_tokens": (bool, True, None, "Leave special tokens out of the text. Default: on."),
    "logprobs": (int | None, None, "N", "Log-probabilities of each token and the N likeliest."),
    "prompt_logprobs": (int | None, None, "N", "The same for the tokens of the prompt."),
}
_SPELLED = {
    "n": "-n",
    "bad_words": "--bad-word",
    "bad_words_token_ids": "--bad-word-token-ids",
    "stop_token_ids": "--stop-token-id",
}


def sampling_flags(
    command: Callable[..., None], without: Collection[str] = ()
) -> Callable[..., None]:
    """Add the sampling flags to a command, which gets `params`, a `SamplingParams`.

    Args:
        command: the command; its other parameters stay.
        without: fields that make no sense in it; they keep their defaults.
    """
    names = [name for name in _FLAGS if name not in without]

    @wraps(command)
    def wrapper(**arguments: Any) -> None:
        command(params=_params({name: arguments.pop(name) for name in names}), **arguments)

    own = inspect.signature(command, eval_str=True).parameters.values()
    kept = [p for p in own if p.name != "params"]
    return with_parameters(wrapper, [*kept, *(_parameter(name) for name in names)])


@contextmanager
def flags_named() -> Iterator[None]:
    """What raises inside calls a field of `SamplingParams` by its flag.

    Raises:
        UserError: the one that was raised, reworded.
    """
    try:
        yield
    except UserError as exc:
        if exc.setting not in _FLAGS:
            raise
        flag = _flag(exc.setting)
        message = exc.message.replace(exc.setting, flag, 1)
        raise UserError(message, remedy=_in_flags(exc.remedy), setting=flag) from exc


def _parameter(name: str) -> inspect.Parameter:
    annotation, default, metavar, text = _FLAGS[name]
    spelled = _flag(name)
    if default is True:
        spelled = f"{spelled}/--no-{spelled.removeprefix('--')}"
    option = typer.Option(
        default,
        spelled,
        metavar=metavar,
        help=text,
        rich_help_panel="Sampling",
        show_default=default is not True,
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=option, annotation=annotation)


def _params(values: dict[str, Any]) -> SamplingParams:
    given = dict(values)
    for name, read in (("logit_bias", _bias), ("bad_words_token_ids", _token_ids)):
        given[name] = tuple(read(text) for text in values.get(name) or ())
    with flags_named():
        return SamplingParams(**given)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise UserError(
            f"--logit-bias is {text!r}",
            remedy="it must be a token id and a number, as in --logit-bias 42=-5",
            setting="--logit-bias",
        ) from None


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        flag = _flag("bad_words_token_ids")
        raise UserError(
            f"{flag} is {text!r}",
            remedy=f"it must be token ids with commas between them, as in {flag} 12,7",
            setting=flag,
        ) from None


def _in_flags(remedy: str) -> str:
    """A remedy with the fields it mentions as flags; those of one word are words as well."""
    return " ".join(_flag(w) if w in _FLAGS and "_" in w else w for w in remedy.split(" "))


def _flag(name: str) -> str:
    return _SPELLED.get(name, "--" + name.replace("_", "-"))
