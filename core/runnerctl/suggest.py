"""The "did you mean" of every message about an unknown name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if a known name is close to `name` (case aside), else an empty string.

    Goes right behind a sentence that says that `name` is unknown.
    """
    by_folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    close = get_close_matches(name.casefold(), by_folded, n=1)
    return f"; did you mean {by_folded[close[0]]!r}?" if close else ""
