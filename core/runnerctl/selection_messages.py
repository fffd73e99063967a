"""The sentences of the count: who said what, what is wrong, and the way out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from runnerctl.ballots import BallotKind, StampedBallot
from runnerctl.decision import CountedBallot, ExplicitChoice, PluginRecord
from runnerctl.problems import Problem
from runnerctl.suggest import block_flag, did_you_mean

VERB: dict[BallotKind, str] = {
    "vote": "votes for",
    "discourage": "discourages",
    "require": "requires",
    "forbid": "forbids",
}


def says(ballot: StampedBallot | CountedBallot) -> str:
    """Who says what about which runner."""
    who = "the host" if ballot.by_host else ballot.plugin
    return f"{who} {VERB[ballot.kind]} {ballot.runner}"


def plugins(ballots: Iterable[StampedBallot]) -> str:
    """Who is behind `ballots`, comma-joined: names of plugins, or the host."""
    return ", ".join(sorted({"the host" if b.by_host else b.plugin for b in ballots}))


def moot(runner: str, winner: str | None, runners: Collection[str]) -> str:
    """Why a ballot for or against `runner` has no bearing on the outcome."""
    if runner not in runners:
        return nobody_provides(runner, runners)
    if winner is None:
        return "the error stands without it"
    if runner == winner:
        return f"{runner} serves without it"
    return f"{runner} would not have been chosen anyway"


def nobody_provides(runner: str, runners: Collection[str]) -> str:
    """Why ballots for `runner` are moot."""
    return f"nobody provides runner {runner!r}{did_you_mean(runner, runners)}"


def unprovided(ballots: Sequence[StampedBallot], runners: Collection[str]) -> list[Problem]:
    """One note for each runner that `ballots` name and nobody provides."""
    return [
        Problem(
            "note",
            f"{nobody_provides(runner, runners).rstrip('?')} "
            f"(named by {plugins(b for b in ballots if b.runner == runner)}); "
            "these ballots have no effect",
        )
        for runner in sorted({b.runner for b in ballots})
    ]


def required_but_unprovided(
    asking: Sequence[StampedBallot],
    runners: Collection[str],
    unavailable: Sequence[PluginRecord],
) -> Problem:
    """Rule 0: a Require of a runner that is not there."""
    runner = asking[0].runner
    install = f"install a plugin that provides {runner!r}"
    return Problem(
        "error",
        f"{nobody_provides(runner, runners).rstrip('?')}, but {_said(asking)}",
        remedy=_ways_out(asking, install, unavailable),
    )


def required_but_forbidden(
    asking: Sequence[StampedBallot],
    against: Sequence[StampedBallot],
    unavailable: Sequence[PluginRecord],
) -> Problem:
    """Rule 1: one plugin requires what another (or the same) forbids."""
    return Problem(
        "error",
        f"no runner can serve this configuration: {_said(asking)}, but {_said(against)}",
        remedy=_ways_out([*asking, *against], unavailable=unavailable),
    )


def two_requires(requires: Sequence[StampedBallot]) -> Problem:
    """Rule 1: two different required runners."""
    return Problem(
        "error",
        f"plugins require different runners: {_said(requires)}",
        remedy=_ways_out(requires),
    )


def unknown_choice(
    explicit: ExplicitChoice,
    runners: Collection[str],
    unavailable: Sequence[PluginRecord],
) -> Problem:
    """Rule 2: the user asked for a runner nobody provides."""
    there = ", ".join(sorted(runners)) or "none"
    return Problem(
        "error",
        f"{nobody_provides(explicit.runner, runners).rstrip('?')}; runners that are there: {there}",
        remedy=_ways_out(
            [],
            f"choose one of them or 'auto', or install a plugin that provides {explicit.runner!r}",
            unavailable,
        ),
        setting=explicit.setting,
    )


def choice_against_hard(
    explicit: ExplicitChoice,
    against: Sequence[StampedBallot],
    unavailable: Sequence[PluginRecord],
) -> Problem:
    """Rule 2: the user's choice cannot serve this configuration."""
    return Problem(
        "error",
        f"runner {explicit.runner!r} was asked for, but {_said(against)}",
        remedy=_ways_out(against, f"remove {explicit.setting}", unavailable),
        setting=explicit.setting,
    )


def tie(votes: Sequence[StampedBallot], tied: Sequence[str], winner: str | None) -> Problem:
    """Rule 4: equal support at the highest priority."""
    message = f"the vote is tied between runners {', '.join(tied)}: {_said(votes)}"
    remedy = f"choose with --runner {'|'.join(tied)}, or raise the priority of one vote"
    if winner is None:
        return Problem("error", f"{message}; strict mode takes no guess", remedy=remedy)
    return Problem("warning", f"{message}; {winner} serves", remedy=remedy)


def nothing_left(
    vetoes: Sequence[StampedBallot],
    runners: Collection[str],
    unavailable: Sequence[PluginRecord],
) -> Problem:
    """Rule 6: no vote stands and the fallback cannot serve."""
    if not runners:
        return Problem(
            "error",
            "no plugin provides a runner",
            remedy=_ways_out([], "install one that does", unavailable),
        )
    forbids = [b for b in vetoes if b.kind == "forbid"]
    free = sorted({*runners} - {b.runner for b in forbids})
    reasons = [_said(vetoes)] if vetoes else []
    if free:
        reasons.append(f"no vote stands for {', '.join(free)}, and none of these is the fallback")
    ask = f"choose it yourself with --runner {'|'.join(free)}" if free else ""
    return Problem(
        "error",
        f"no runner can serve this configuration: {'; '.join(reasons)}",
        remedy=_ways_out(forbids, ask, unavailable),
    )


def _said(ballots: Sequence[StampedBallot]) -> str:
    return "; ".join(f"{says(b)}{_because(b)}" for b in ballots)


def _because(b: StampedBallot) -> str:
    return f": {b.reason} ({b.runner} comes from {b.plugin})" if b.by_host else f" ({b.reason})"


def _ways_out(
    ballots: Sequence[StampedBallot], first: str = "", unavailable: Sequence[PluginRecord] = ()
) -> str:
    """`first`, the ballots' own remedies, blocking those that offer none, and what is missing.

    A plugin that did not load may be what would have given a runner what it lacks.
    """
    ways = [first] if first else []
    ways += [b.remedy for b in ballots if b.remedy]
    ways += [
        f"block plugin {b.plugin} with {block_flag(b.plugin)}" for b in ballots if not b.remedy
    ]
    if unavailable:
        listed = "; ".join(f"{r.name} ({r.status}: {r.error})" for r in unavailable)
        ways.append(f"get these plugins to load: {listed}")
    return ", or ".join(dict.fromkeys(ways))
