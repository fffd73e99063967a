"""The count: from the plugins' ballots to one runner.

Pure: no I/O, no clock, no global state. The rules, in order, and nothing else:

0. Ballots for a runner nobody provides are moot; a `Require` of one is an error.
1. Hard ballots that contradict each other are an error.
2. An explicit choice wins, unless it is unknown or a hard ballot is against it (errors).
3. A required runner wins.
4. Standing votes (provided, not forbidden, not cancelled by a `Discourage` of equal or
   higher priority): the highest priority, then the number of plugins at that priority.
   A tie is an error in strict mode; else the fallback runner if it is in the tie, else
   the first runner by name, with a warning.
5. The fallback runner, unless forbidden.
6. An error that lists every reason.

The errors of rules 0 to 2 are collected and reported together. What became of each
ballot is said by `ballot_status`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from runnerctl import selection_messages as say
from runnerctl.ballot_status import Finding, with_status
from runnerctl.ballots import StampedBallot
from runnerctl.decision import CountedBallot, ExplicitChoice, PluginRecord
from runnerctl.problems import Problem
from runnerctl.runner.spec import RunnerSpec


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the count found: the runner (or None), every ballot with its status, and problems."""

    runner: str | None
    ballots: tuple[CountedBallot, ...]
    problems: tuple[Problem, ...]


def count(
    ballots: Iterable[StampedBallot],
    runners: Mapping[str, RunnerSpec],
    explicit: ExplicitChoice | None = None,
    strict: bool = False,
    unavailable: Sequence[PluginRecord] = (),
) -> Outcome:
    """Count the ballots.

    Args:
        ballots: in any order; the outcome does not depend on it.
        runners: what the plugins provide, by name; at most one with `fallback`.
        explicit: the user's own choice, if any.
        strict: a tie is an error.
        unavailable: blocked and failed plugins, to name in the way out of an error.
    """
    box = sorted(ballots)
    known = [b for b in box if b.runner in runners]
    absent = [b for b in box if b.runner not in runners and b.kind != "require"]
    requires = [b for b in box if b.kind == "require"]
    finding = _contradictions(requires, known, explicit, runners, unavailable)
    if finding is None and explicit:
        by = f"explicit choice ({explicit.setting})"
        finding = Finding(explicit.runner, decisive=requires, by=by)
    elif finding is None and requires:
        finding = Finding(requires[0].runner, decisive=requires, by=say.plugins(requires))
    elif finding is None:
        finding = _poll(known, runners, strict, unavailable)
    return Outcome(
        finding.runner,
        with_status(box, finding, runners),
        (*finding.problems, *say.unprovided(absent, runners)),
    )


def _contradictions(
    requires: Sequence[StampedBallot],
    known: Sequence[StampedBallot],
    explicit: ExplicitChoice | None,
    runners: Mapping[str, RunnerSpec],
    unavailable: Sequence[PluginRecord],
) -> Finding | None:
    """The errors of rules 0 to 2 with the ballots they rest on; None if there are none."""
    forbids = [b for b in known if b.kind == "forbid"]
    wanted = sorted({b.runner for b in requires})
    problems: list[Problem] = []
    basis: list[StampedBallot] = []
    for runner in wanted:
        asking = [b for b in requires if b.runner == runner]
        against = [b for b in forbids if b.runner == runner]
        if runner not in runners:
            problems.append(say.required_but_unprovided(asking, runners, unavailable))
            basis += asking
        elif against:
            problems.append(say.required_but_forbidden(asking, against, unavailable))
            basis += asking + against
    if len(wanted) > 1:
        problems.append(say.two_requires(requires))
        basis += requires
    if explicit and explicit.runner not in runners:
        problems.append(say.unknown_choice(explicit, runners, unavailable))
    if explicit:
        against = [b for b in requires if b.runner != explicit.runner]
        against += [b for b in forbids if b.runner == explicit.runner]
        if against:
            problems.append(say.choice_against_hard(explicit, against, unavailable))
            basis += against
    return Finding(None, decisive=basis, problems=problems) if problems else None


def _poll(
    known: Sequence[StampedBallot],
    runners: Mapping[str, RunnerSpec],
    strict: bool,
    unavailable: Sequence[PluginRecord],
) -> Finding:
    """Rules 4 to 6: the votes, the fallback, or that nothing is left.

    Vetoes are decisive if the poll would end differently without those against the same
    runner, or if nothing is left. Lifting them changes only how that one runner fares, so
    vetoes that are moot one runner at a time are moot together.
    """
    fallback = next((name for name in sorted(runners) if runners[name].fallback), None)
    votes = [b for b in known if b.kind == "vote"]
    vetoes = [b for b in known if b.kind != "vote"]  # a Require would have settled it before
    winner, tied, leading = _elect(votes, vetoes, fallback, strict)
    barred = {b.runner for b in vetoes}
    if winner or tied:
        for runner in sorted(barred):
            others = [b for b in vetoes if b.runner != runner]
            if _elect(votes, others, fallback, strict)[:2] == (winner, tied):
                barred.remove(runner)
    lowest: dict[str, int] = {}
    for b in votes:
        lowest[b.runner] = min(b.priority, lowest.get(b.runner, b.priority))
    decisive = [b for b in vetoes if b.runner in barred and b.reach >= lowest.get(b.runner, inf)]

    winning = [b for b in leading if winner in (b.runner, None)]
    problems = []
    if tied:
        problems.append(say.tie(leading, tied, winner))
    elif winner is None:
        problems.append(say.nothing_left(decisive, runners, unavailable))
    by = say.plugins(winning) or "the fallback"
    return Finding(winner, decisive=[*winning, *decisive], by=by, problems=problems)


def _elect(
    votes: Sequence[StampedBallot],
    vetoes: Sequence[StampedBallot],
    fallback: str | None,
    strict: bool,
) -> tuple[str | None, tuple[str, ...], list[StampedBallot]]:
    """Rules 4 and 5: the winner, the runners in a tie (none if there was none), their votes."""
    bars: dict[str, float] = defaultdict(lambda: -inf)
    for veto in vetoes:
        bars[veto.runner] = max(bars[veto.runner], veto.reach)
    standing = [b for b in votes if b.priority > bars[b.runner]]
    if not standing:
        return (None if fallback is None or bars[fallback] == inf else fallback), (), []
    top = max(b.priority for b in standing)
    support = Counter(
        runner for runner, _ in {(b.runner, b.plugin) for b in standing if b.priority == top}
    )
    most = max(support.values())
    leaders = tuple(sorted(runner for runner, plugins in support.items() if plugins == most))
    leading = [b for b in standing if b.priority == top and b.runner in leaders]
    if len(leaders) == 1:
        return leaders[0], (), leading
    first = fallback if fallback in leaders else leaders[0]
    return (None if strict else first), leaders, leading
