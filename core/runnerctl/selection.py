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

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

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
        judge = partial(_under_errors, basis=basis)
    elif explicit or requires:
        runner = explicit.runner if explicit else requires[0].runner
        by = f"explicit choice ({explicit.setting})" if explicit else say.plugins(requires)
        problems, judge = [], partial(_under_order, runner=runner, by=by)
    else:
        poll = Poll(known, runners, strict)
        runner, problems, judge = poll.winner, poll.problems(unavailable), poll.verdict
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
            errors.append(
                (say.required_but_forbidden(asking, against, unavailable), asking + against)
            )
    if len(wanted) > 1:
        errors.append((say.two_requires(requires), requires))
    if explicit:
        if explicit.runner not in runners:
            errors.append((say.unknown_choice(explicit, runners, unavailable), []))
        against = [b for b in requires if b.runner != explicit.runner]
        against += [b for b in forbids if b.runner == explicit.runner]
        if against:
            errors.append((say.choice_against_hard(explicit, against, unavailable), against))
    return errors


@dataclass(frozen=True, slots=True)
class Result:
    """How a poll ended.

    Attributes:
        winner: the runner, or None (a tie in strict mode, or nothing left).
        tied: the runners in a tie, sorted; empty if there was none.
        top: the highest priority of a standing vote; None if no vote stands.
    """

    winner: str | None
    tied: tuple[str, ...]
    top: int | None = field(compare=False)


def elect(
    votes: Collection[tuple[str, int, str]],
    bars: Mapping[str, float],
    fallback: str | None,
    strict: bool,
) -> Result:
    """Rules 4 and 5.

    Args:
        votes: (runner, priority, plugin), each once.
        bars: per vetoed runner the priority above which a vote for it stands; infinite
            for a forbidden one.
        fallback: the fallback runner, if any.
        strict: a tie has no winner.
    """
    standing = [vote for vote in votes if vote[1] > bars.get(vote[0], -inf)]
    top = max((priority for _, priority, _ in standing), default=None)
    support = Counter(runner for runner, priority, _ in standing if priority == top)
    most = max(support.values(), default=0)
    leaders = sorted(runner for runner, plugins in support.items() if plugins == most)
    if len(leaders) > 1:
        first = fallback if fallback in leaders else leaders[0]
        return Result(None if strict else first, tuple(leaders), top)
    if leaders:
        return Result(leaders[0], (), top)
    forbidden = fallback is None or bars.get(fallback) == inf
    return Result(None if forbidden else fallback, (), None)


class Poll:
    """Rules 4 to 6 over the ballots for provided runners, and the status of each ballot.

    A veto is decisive if the poll would end differently without the vetoes against its
    runner. Lifting them changes only how that one runner fares, so vetoes that are moot
    one runner at a time are moot together.
    """

    def __init__(
        self, known: Sequence[StampedBallot], runners: Mapping[str, RunnerSpec], strict: bool
    ) -> None:
        self.known, self.runners = known, runners
        self.votes = [b for b in known if b.kind == "vote"]
        self.vetoes: dict[str, list[StampedBallot]] = {}
        for b in known:
            if b.kind != "vote":  # a Require would have settled the matter before
                self.vetoes.setdefault(b.runner, []).append(b)

        bars = {runner: max(map(_bar, against)) for runner, against in self.vetoes.items()}
        votes = {(b.runner, b.level, b.plugin) for b in self.votes}
        fallback = next((r for r in sorted(runners) if runners[r].fallback), None)
        self.result = elect(votes, bars, fallback, strict)
        self.turned = {  # runners with decisive vetoes
            runner
            for runner in bars
            if elect(votes, {**bars, runner: -inf}, fallback, strict) != self.result
        }

        self.winner, self.tied = self.result.winner, self.result.tied
        leaders = self.tied or (self.winner,)
        self.leading = [b for b in self.votes if b.level == self.result.top and b.runner in leaders]
        winning = [b for b in self.leading if self.winner in (b.runner, None)]
        self.winning = {id(b) for b in winning}
        self.by = say.plugins(winning) or "the fallback"
        self._cancelled_by: dict[tuple[str, int], Verdict] = {}
        self.lowest_vote: dict[str, int] = {}
        for b in self.votes:
            self.lowest_vote[b.runner] = min(b.level, self.lowest_vote.get(b.runner, b.level))

    def problems(self, unavailable: Sequence[PluginRecord]) -> list[Problem]:
        """The tie, or that nothing is left."""
        if self.tied:
            return [say.tie(self.leading, self.tied, self.winner)]
        if self.winner is None:
            vetoes = [b for b in self.known if b.kind == "forbid" or self._cancels(b)]
            forbidden = {b.runner for b in vetoes if b.kind == "forbid"}
            free = sorted({*self.runners} - forbidden)
            return [say.nothing_left(vetoes, self.runners, free, unavailable)]
        return []

    def verdict(self, b: StampedBallot) -> Verdict:
        """What became of one ballot for a provided runner."""
        return self._of_vote(b) if b.kind == "vote" else self._of_veto(b)

    def _of_vote(self, b: StampedBallot) -> Verdict:
        if id(b) in self.winning:
            return DECISIVE
        if b.runner == self.winner:
            return Verdict("moot", note=f"{b.runner} serves without it")
        if b.runner in self.turned:
            return self._cancelled(b.runner, b.level)
        if self.winner is None:
            return Verdict("moot", note="the tie is at a higher priority")
        return Verdict("overridden", self.by)

    def _cancelled(self, runner: str, priority: int) -> Verdict:
        if (runner, priority) not in self._cancelled_by:  # votes come by the dozen
            against = [veto for veto in self.vetoes[runner] if _bar(veto) >= priority]
            by = Verdict("overridden", say.plugins(against))
            self._cancelled_by[runner, priority] = by
        return self._cancelled_by[runner, priority]

    def _of_veto(self, b: StampedBallot) -> Verdict:
        nothing_left = self.winner is None and not self.tied  # an error that lists each Forbid
        if b.kind == "forbid" and (b.runner in self.turned or nothing_left):
            return DECISIVE
        if b.runner in self.turned and self._cancels(b):
            return DECISIVE
        if b.runner == self.winner:
            return Verdict("overridden", self.by)
        return Verdict("moot", note=f"{b.runner} would not have been chosen anyway")

    def _cancels(self, b: StampedBallot) -> bool:
        """True for a Discourage that cancels at least one vote."""
        return b.kind == "discourage" and self.lowest_vote.get(b.runner, inf) <= b.level


def _bar(veto: StampedBallot) -> float:
    return inf if veto.kind == "forbid" else veto.level


def _under_errors(b: StampedBallot, basis: Collection[int]) -> Verdict:
    """The status of a ballot when errors of rules 0 to 2 leave no runner."""
    return DECISIVE if id(b) in basis else MOOT


def _under_order(b: StampedBallot, runner: str, by: str) -> Verdict:
    """The status of a ballot when an explicit choice or a Require settles the matter."""
    if b.kind == "require":
        return DECISIVE
    opposed = (b.kind == "vote") == (b.runner != runner)
    if b.kind != "forbid" and opposed:
        return Verdict("overridden", by)
    return Verdict("moot", note=f"{by} settles it")


def _canonical(b: StampedBallot) -> tuple[str | int, ...]:
    x = b.ballot
    return (b.plugin, x.kind, x.runner, b.level, x.reason, b.distribution, b.version, b.remedy)


def _stamp_verdicts(
    box: Sequence[StampedBallot],
    runners: Collection[str],
    judge: Callable[[StampedBallot], Verdict],
) -> tuple[CountedBallot, ...]:
    counted = []
    for b in box:
        x = b.ballot
        if x.runner in runners or x.kind == "require":
            verdict = judge(b)
        else:
            verdict = Verdict("moot", note=say.nobody_provides(x.runner, runners))
        counted.append(
            CountedBallot(
                plugin=b.plugin,
                distribution=b.distribution,
                version=b.version,
                kind=x.kind,
                runner=x.runner,
                reason=x.reason,
                priority=b.priority,
                remedy=b.remedy,
                status=verdict.status,
                overridden_by=verdict.overridden_by,
                note=verdict.note,
            )
        )
    return tuple(counted)
