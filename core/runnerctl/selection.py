"""The count: from the plugins' ballots to one runner, and what became of each ballot.

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

The errors of rules 0 to 2 are collected and reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from runnerctl import selection_messages as say
from runnerctl.ballots import Ballot, BallotKind
from runnerctl.decision import BallotStatus, CountedBallot, ExplicitChoice, PluginRecord
from runnerctl.problems import Problem
from runnerctl.runner.spec import RunnerSpec


@dataclass(frozen=True, slots=True)
class StampedBallot:
    """A ballot with the plugin it came from, as the host (not the plugin) says."""

    ballot: Ballot
    plugin: str
    distribution: str = ""
    version: str = ""

    @property
    def kind(self) -> BallotKind:
        """`vote`, `discourage`, `require` or `forbid`."""
        return self.ballot.kind

    @property
    def runner(self) -> str:
        """The runner the ballot speaks of."""
        return self.ballot.runner

    @property
    def priority(self) -> int | None:
        """The priority of a soft ballot; None for a hard one."""
        return getattr(self.ballot, "priority", None)

    @property
    def level(self) -> int:
        """The priority as a number to compare; 0 for a hard ballot, where nothing compares it."""
        return getattr(self.ballot, "priority", 0)

    @property
    def remedy(self) -> str:
        """The remedy of a hard ballot; empty for a soft one."""
        return getattr(self.ballot, "remedy", "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the count found: the runner (or None), every ballot with its status, and problems."""

    runner: str | None
    ballots: tuple[CountedBallot, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one ballot; the last three fields of a `CountedBallot`."""

    status: BallotStatus
    overridden_by: str | None = None
    note: str = ""


DECISIVE = Verdict("decisive")
MOOT = Verdict("moot")


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
    box = sorted(ballots, key=_canonical)
    known = [b for b in box if b.runner in runners]
    requires = [b for b in box if b.kind == "require"]
    forbids = [b for b in known if b.kind == "forbid"]
    notes = say.unprovided([b for b in box if b.runner not in runners], runners)

    judge: Callable[[StampedBallot], Verdict]
    runner: str | None
    errors = _hard_errors(requires, forbids, explicit, runners, unavailable)
    if errors:
        basis = {id(b) for _, rests_on in errors for b in rests_on}
        runner, problems = None, [problem for problem, _ in errors]
        judge = lambda b: DECISIVE if id(b) in basis else MOOT  # noqa: E731
    elif explicit or requires:
        runner = explicit.runner if explicit else requires[0].runner
        by = f"explicit choice ({explicit.setting})" if explicit else say.plugins(requires)
        problems, judge = [], partial(_under_order, runner=runner, by=by)
    else:
        poll = Poll(known, runners, strict)
        runner, problems, judge = poll.winner, poll.problems(), _Verdicts(poll).of
    return Outcome(runner, _stamp_verdicts(box, runners, judge), (*problems, *notes))


def _hard_errors(
    requires: list[StampedBallot],
    forbids: list[StampedBallot],
    explicit: ExplicitChoice | None,
    runners: Mapping[str, RunnerSpec],
    unavailable: Sequence[PluginRecord],
) -> list[tuple[Problem, list[StampedBallot]]]:
    """The errors of rules 0 to 2, each with the ballots it rests on."""
    errors: list[tuple[Problem, list[StampedBallot]]] = []
    wanted = sorted({b.runner for b in requires})
    for runner in wanted:
        asking = [b for b in requires if b.runner == runner]
        against = [b for b in forbids if b.runner == runner]
        if runner not in runners:
            errors.append((say.required_but_unprovided(asking, runners, unavailable), asking))
        elif against:
            errors.append((say.required_but_forbidden(asking, against), asking + against))
    if len(wanted) > 1:
        errors.append((say.two_requires(requires), requires))
    if explicit:
        if explicit.runner not in runners:
            errors.append((say.unknown_choice(explicit, runners, unavailable), []))
        against = [b for b in requires if b.runner != explicit.runner]
        against += [b for b in forbids if b.runner == explicit.runner]
        if against:
            errors.append((say.choice_against_hard(explicit, against), against))
    return errors


class Poll:
    """Rules 4 to 6 over the ballots for provided runners.

    Attributes:
        winner: the runner, or None (a tie in strict mode, or nothing left).
        tied: the runners in a tie, sorted; empty if there was none.
        top: the highest priority of a standing vote; None if no vote stands.
    """

    def __init__(
        self,
        known: Sequence[StampedBallot],
        runners: Mapping[str, RunnerSpec],
        strict: bool,
        lifted: str | None = None,
    ) -> None:
        """Hold the poll; `lifted` leaves out all vetoes against that one runner."""
        self.known, self.runners, self.strict = known, runners, strict
        self.votes = [b for b in known if b.kind == "vote"]
        self.vetoes: dict[str, list[StampedBallot]] = {}
        for b in known:
            if b.kind in ("discourage", "forbid") and b.runner != lifted:
                self.vetoes.setdefault(b.runner, []).append(b)

        standing = [b for b in self.votes if not self.vetoing(b)]
        self.top = max((b.level for b in standing), default=None)
        support: dict[str, set[str]] = {}  # plugins, not ballots: each counts once per runner
        for b in standing:
            if b.level == self.top:
                support.setdefault(b.runner, set()).add(b.plugin)
        most = max(map(len, support.values()), default=0)
        leaders = sorted(runner for runner, plugins in support.items() if len(plugins) == most)
        fallback = next((r for r in sorted(runners) if runners[r].fallback), None)

        self.tied = tuple(leaders) if len(leaders) > 1 else ()
        self.winner: str | None
        if self.tied:
            first = fallback if fallback in leaders else leaders[0]
            self.winner = None if strict else first
        elif leaders:
            self.winner = leaders[0]
        else:
            self.winner = None if fallback is None or self.forbids(fallback) else fallback

    def vetoing(self, vote: StampedBallot) -> list[StampedBallot]:
        """The vetoes that cancel this vote."""
        against = self.vetoes.get(vote.runner, ())
        return [b for b in against if b.kind == "forbid" or b.level >= vote.level]

    def forbids(self, runner: str) -> list[StampedBallot]:
        """The Forbids of one runner."""
        return [b for b in self.vetoes.get(runner, ()) if b.kind == "forbid"]

    def leading_votes(self) -> list[StampedBallot]:
        """The votes the result rests on: the winner's (or the tied runners') at the top.

        At one priority all votes for a runner stand or fall together, so these stand.
        """
        leaders: Collection[str | None] = self.tied or (self.winner,)
        return [b for b in self.votes if b.level == self.top and b.runner in leaders]

    def problems(self) -> list[Problem]:
        """The tie, or that nothing is left."""
        if self.tied:
            return [say.tie(self.leading_votes(), self.tied, self.winner)]
        if self.winner is None:
            free = [runner for runner in sorted(self.runners) if not self.forbids(runner)]
            lowest = self.lowest_votes()
            vetoes = [b for b in self.known if b.kind == "forbid" or _cancels(b, lowest)]
            return [say.nothing_left(vetoes, self.runners, free)]
        return []

    def lowest_votes(self) -> dict[str, int]:
        """The lowest priority at which each runner has a vote, standing or not."""
        lowest: dict[str, int] = {}
        for b in self.votes:
            lowest[b.runner] = min(b.level, lowest.get(b.runner, b.level))
        return lowest


def _cancels(b: StampedBallot, lowest_votes: Mapping[str, int]) -> bool:
    """True for a Discourage that cancels at least one vote."""
    return b.kind == "discourage" and lowest_votes.get(b.runner, b.level + 1) <= b.level


class _Verdicts:
    """The status of each ballot of a poll.

    A veto is decisive if the poll would end differently without the vetoes against
    its runner. Lifting them changes only how that one runner fares, so vetoes that
    are moot one runner at a time are moot together.
    """

    def __init__(self, poll: Poll) -> None:
        self.poll = poll
        self.winning = {
            id(b) for b in poll.leading_votes() if poll.winner is None or b.runner == poll.winner
        }
        self.by = say.plugins(b for b in poll.votes if id(b) in self.winning) or "the fallback"
        self.lowest_votes = poll.lowest_votes()
        self.turned = {runner for runner in poll.vetoes if self._differs_without_vetoes(runner)}

    def _differs_without_vetoes(self, runner: str) -> bool:
        poll = self.poll
        other = Poll(poll.known, poll.runners, poll.strict, lifted=runner)
        return (other.winner, other.tied) != (poll.winner, poll.tied)

    def of(self, b: StampedBallot) -> Verdict:
        return self._vote(b) if b.kind == "vote" else self._veto(b)

    def _vote(self, b: StampedBallot) -> Verdict:
        poll = self.poll
        if id(b) in self.winning:
            return DECISIVE
        if b.runner == poll.winner:
            return Verdict("moot", note=f"{b.runner} serves without it")
        if b.runner in self.turned:
            return Verdict("overridden", say.plugins(poll.vetoing(b)))
        if poll.winner is None:
            return Verdict("moot", note="the tie is at a higher priority")
        return Verdict("overridden", self.by)

    def _veto(self, b: StampedBallot) -> Verdict:
        poll = self.poll
        nothing_left = poll.winner is None and not poll.tied  # an error that lists each Forbid
        if b.kind == "forbid" and (b.runner in self.turned or nothing_left):
            return DECISIVE
        if b.runner in self.turned and _cancels(b, self.lowest_votes):
            return DECISIVE
        if b.runner == poll.winner:
            return Verdict("overridden", self.by)
        return Verdict("moot", note=f"{b.runner} would not have been chosen anyway")


def _under_order(b: StampedBallot, runner: str, by: str) -> Verdict:
    """The status of a ballot when an explicit choice or a Require settles the matter."""
    if b.kind == "require":
        return DECISIVE
    opposed = (b.kind == "vote") == (b.runner != runner)
    if b.kind != "forbid" and opposed:
        return Verdict("overridden", by)
    return Verdict("moot", note=f"{by} settles it")


def _canonical(b: StampedBallot) -> tuple[str | int, ...]:
    return (
        b.plugin,
        b.kind,
        b.runner,
        b.level,
        b.ballot.reason,
        b.distribution,
        b.version,
        b.remedy,
    )


def _stamp_verdicts(
    box: Sequence[StampedBallot],
    runners: Collection[str],
    judge: Callable[[StampedBallot], Verdict],
) -> tuple[CountedBallot, ...]:
    counted = []
    for b in box:
        if b.runner in runners or b.kind == "require":
            verdict = judge(b)
        else:
            verdict = Verdict("moot", note=say.nobody_provides(b.runner, runners))
        counted.append(
            CountedBallot(
                plugin=b.plugin,
                distribution=b.distribution,
                version=b.version,
                kind=b.kind,
                runner=b.runner,
                reason=b.ballot.reason,
                priority=b.priority,
                remedy=b.remedy,
                status=verdict.status,
                overridden_by=verdict.overridden_by,
                note=verdict.note,
            )
        )
    return tuple(counted)
