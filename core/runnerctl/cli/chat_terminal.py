"""Where a conversation is held: this process's stdin, stdout and stderr."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from runnerctl.cli.chat_session import StopNow
from runnerctl.cli.chat_wrap import WordWrap
from runnerctl.cli.generate_load import as_unicode
from runnerctl.cli.render import show

_ASK = "> "


class StandardStreams:
    """Answers on stdout, everything else on stderr; a line editor where there is a terminal.

    Attributes:
        interactive: stdin is a terminal.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        self._edited = self.interactive and sys.stdout.isatty()
        self._readline = _readline() if self._edited else None
        self._wrap = WordWrap(_columns) if sys.stdout.isatty() else None

    def read(self) -> str | None:
        """The next line. Ctrl-D ends, and Ctrl-C does if nothing was typed.

        Raises:
            PromptError: it is not text.
        """
        while True:
            try:
                line = self._read_line()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print(file=sys.stderr)
                if self._readline is not None and self._readline.get_line_buffer():
                    continue
                return None
            if line is None and self.interactive:
                print(file=sys.stderr)
            return None if line is None else as_unicode(line, "the message")

    def say(self, text: str) -> None:
        """A piece of an answer, at once; a terminal gets it a word at a time."""
        print(self._wrap.add(text) if self._wrap else text, end="", flush=True)

    def note(self, text: str) -> None:
        """A line for the reader, broken between words."""
        sys.stdout.flush()
        show(text, stderr=True)

    @contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """While entered, a first Ctrl-C is only remembered, so that the step in hand ends well."""
        if not self.interactive:
            yield lambda: False
            return
        presses = 0

        def press(*_: Any) -> None:
            nonlocal presses
            presses += 1
            if presses > 1:
                raise StopNow

        before = signal.signal(signal.SIGINT, press)
        try:
            yield lambda: presses > 0
        finally:
            signal.signal(signal.SIGINT, before)

    def _read_line(self) -> str | None:
        if self._edited:
            # the editor has to know the prompt, or it breaks long lines in the wrong place
            try:
                return input(_ASK)
            except EOFError:
                return None
        if self.interactive:
            print(_ASK, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline() if sys.stdin is not None else ""
        return line.removesuffix("\n") if line else None


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _readline() -> ModuleType | None:
    """The line editor, which `input` uses once it is imported; not every Python has one."""
    try:
        import readline
    except ImportError:
        return None
    return readline
