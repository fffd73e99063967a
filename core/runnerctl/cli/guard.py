"""What every command does when something goes wrong: exit codes, never a traceback."""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import typer

from runnerctl.errors import UserError, WorkerError

FINE = 0
OUR_FAULT = 1
USERS_FAULT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn exceptions of a command into a message and an exit code; adds `--traceback`."""

    @wraps(command)
    def wrapper(*, traceback: bool, **arguments: Any) -> None:
        _prepare_stdout()
        try:
            command(**arguments)
            # here rather than at interpreter exit, where a closed pipe could not be caught
            sys.stdout.flush()
        except UserError as exc:
            if traceback:
                raise
            _fail(f"error: {exc}", USERS_FAULT)
        except KeyboardInterrupt:
            # on a line of its own, below whatever was streamed so far
            _fail("\ninterrupted", INTERRUPTED)
        except BrokenPipeError:
            _drop_stdout()
            raise typer.Exit(BROKEN_PIPE) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as exc:
            if traceback:
                raise
            _fail(*_told(exc))

    flag = inspect.Parameter(
        "traceback",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(False, "--traceback", help="On an error, show Python's traceback."),
        annotation=bool,
    )
    return with_parameters(
        wrapper, [*inspect.signature(command, eval_str=True).parameters.values(), flag]
    )


def with_parameters(
    function: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """Give `function` the signature that typer reads its arguments and options from."""
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    function.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in keyword}
    return function


def stdout_is_unicode() -> bool:
    """Whether stdout carries every character; where not, JSON has to be escaped."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def _told(exc: Exception) -> tuple[str, int]:
    """What is said of an error that is not the user's mistake, and the exit code."""
    if _is_full(exc):
        _drop_stdout()
        return f"error: the output cannot be written: {exc}", USERS_FAULT
    if isinstance(exc, WorkerError):
        hint = "\n  The same command with --traceback shows what is known." if exc.details else ""
        return f"error: {exc}{hint}", OUR_FAULT
    said = (
        f"internal error: {type(exc).__name__}: {exc}\n"
        "  This is a fault of runnerctl or of a plugin. "
        "The same command with --traceback shows where."
    )
    return said, OUR_FAULT


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(code)


def _prepare_stdout() -> None:
    """Nothing about stdout, closed or of few characters, is to end a command."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the process
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _is_full(exc: Exception) -> bool:
    return isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _drop_stdout() -> None:
    """Let the interpreter's last flush go nowhere instead of failing."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is no file, as in a test
        return
