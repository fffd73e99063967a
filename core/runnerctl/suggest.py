"""Parts that many messages share: "did you mean", and how to block a plugin."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from shlex import quote


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, case aside; None if none is close."""
    by_folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    close = get_close_matches(name.casefold(), by_folded, n=1)
    return by_folded[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if a known name is close to `name`, else an empty string.

    Goes right behind a sentence that says that `name` is unknown.
    """
    match = closest(name, known)
    return f"; did you mean {match!r}?" if match else ""


def block_flag(plugin: str) -> str:
    """The flag that keeps a plugin out, ready to be pasted into a shell."""
    return f"-p {quote(f'no:{plugin}')}"
