"""What became of each ballot: decisive, overridden and by whom, or moot and why.

One property makes these words mean something: take away every moot ballot, and the
outcome stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from runnerctl import selection_messages as say
from runnerctl.ballots import StampedBallot
from runnerctl.decision import BallotStatus, CountedBallot
from runnerctl.problems import Problem


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule of the count found.

    Attributes:
        runner: the winner, or None if there is an error in `problems`.
        decisive: the ballots that this, or the error, rests on.
        by: what beat the ballots that wished otherwise; empty if nothing did.
        problems: what the user has to know.
    """

    runner: str | None
    decisive: Sequence[StampedBallot]
    by: str = ""
    problems: Sequence[Problem] = ()


def with_status(
    box: Sequence[StampedBallot], finding: Finding, runners: Collection[str]
) -> tuple[CountedBallot, ...]:
    """Every ballot, in the order given, with what became of it.

    A vote for another runner than the winner is overridden by the decisive vetoes that
    cancel it, else by what made the winner win; a discouragement of the winner by the
    latter. What is neither decisive nor overridden is moot.
    """
    decisive = set(finding.decisive)
    vetoes = [b for b in finding.decisive if b.kind in ("discourage", "forbid")]

    @cache  # votes come by the dozen, runners and priorities do not
    def cancelled_by(runner: str, priority: int) -> str:
        return say.plugins(v for v in vetoes if v.runner == runner and v.reach >= priority)

    @cache
    def moot_because(runner: str) -> str:
        return say.moot(runner, finding.runner, runners)

    def status(b: StampedBallot) -> tuple[BallotStatus, str | None, str]:
        by = ""
        if b in decisive:
            return "decisive", None, ""
        if b.kind == "vote" and b.runner != finding.runner and b.runner in runners:
            by = cancelled_by(b.runner, b.priority) or finding.by
        elif b.kind == "discourage" and b.runner == finding.runner:
            by = finding.by
        return ("overridden", by, "") if by else ("moot", None, moot_because(b.runner))

    return tuple(
        CountedBallot(
            b.plugin,
            b.distribution,
            b.version,
            b.kind,
            b.runner,
            b.reason,
            b.priority if b.kind in ("vote", "discourage") else None,
            b.remedy,
            *status(b),
            by_host=b.by_host,
        )
        for b in box
    )
