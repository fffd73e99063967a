"""What the user sees on stderr while a model is fetched, converted or compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(message: str) -> None:
    """One line on stderr."""
    _console().print(message)


@contextmanager
def download_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes there are so far.

    On a terminal it moves a bar; anywhere else one line is all there is.
    """
    console = _console()
    megabytes = total_bytes / 1e6
    if not console.is_terminal:
        console.print(f"Fetching {what} ({megabytes:.0f} MB), once")
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"Fetching {what}", total=total_bytes)
        yield lambda so_far: progress.update(task, completed=min(so_far, total_bytes))


@contextmanager
def spinner(message: str, *, terminal_only: bool = False) -> Iterator[None]:
    """Show `message` while the block runs; without a terminal it is a line that stays.

    Args:
        message: what is being done.
        terminal_only: for what happens at every start: logs need not tell of it.
    """
    console = _console()
    if console.is_terminal:
        with console.status(message):
            yield
        return
    if not terminal_only:
        console.print(message)
    yield


def _console() -> Console:
    from rich.console import Console

    # The stream as it is now: it may be redirected while a spinner turns.
    return Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
