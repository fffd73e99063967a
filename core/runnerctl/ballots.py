"""The four answers a plugin may give to `select_runner`.

A ballot says what and why, never who: the host stamps each one with the plugin
and distribution it came from (`StampedBallot`), so that no plugin can vote in
another's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal, NamedTuple

BUILTIN = -10
"""The priority at which built-in policies speak, below the default of 0, so that
anyone's plugin overrides them without a tie."""

BallotKind = Literal["vote", "discourage", "require", "forbid"]


@dataclass(frozen=True, slots=True)
class Vote:
    """I would serve this with `runner`. The highest priority wins, then the number of plugins.

    Raises:
        ValueError: `runner` or `reason` is empty, or `priority` is not an int.
    """

    kind: ClassVar[BallotKind] = "vote"
    runner: str
    reason: str
    priority: int = 0

    def __post_init__(self) -> None:
        _check(self, self.runner, self.reason, self.priority)


@dataclass(frozen=True, slots=True)
class Discourage:
    """Better not `runner`: cancels votes for it of equal or lower priority.

    An explicit choice, or a vote of higher priority, may still take the runner.

    Raises:
        ValueError: as for `Vote`.
    """

    kind: ClassVar[BallotKind] = "discourage"
    runner: str
    reason: str
    priority: int = 0

    def __post_init__(self) -> None:
        _check(self, self.runner, self.reason, self.priority)


@dataclass(frozen=True, slots=True)
class Require:
    """Only `runner` can serve this. Not even an explicit choice overrides it.

    `remedy` tells the user which setting to change if they want another runner.

    Raises:
        ValueError: `runner` or `reason` is empty, or `remedy` is not text.
    """

    kind: ClassVar[BallotKind] = "require"
    runner: str
    reason: str
    remedy: str = ""

    def __post_init__(self) -> None:
        _check(self, self.runner, self.reason, remedy=self.remedy)


@dataclass(frozen=True, slots=True)
class Forbid:
    """`runner` cannot serve this. Not even an explicit choice overrides it.

    Raises:
        ValueError: `runner` or `reason` is empty, or `remedy` is not text.
    """

    kind: ClassVar[BallotKind] = "forbid"
    runner: str
    reason: str
    remedy: str = ""

    def __post_init__(self) -> None:
        _check(self, self.runner, self.reason, remedy=self.remedy)


Ballot = Vote | Discourage | Require | Forbid


class StampedBallot(NamedTuple):
    """A ballot with the plugin it came from, as the host (not the plugin) says.

    A plain tuple, because the count compares and sorts them by the hundred; the order of
    the fields is the order in which a Decision lists ballots.

    Attributes:
        priority: of a soft ballot; 0 for a hard one, which has none.
        remedy: of a hard ballot; empty for a soft one.
        by_host: the host itself cast it, about a runner that `plugin` provides.
    """

    plugin: str
    kind: BallotKind
    runner: str
    priority: int
    reason: str
    remedy: str
    distribution: str
    version: str
    by_host: bool = False

    @property
    def reach(self) -> float:
        """The highest priority of a vote that this veto cancels."""
        return inf if self.kind == "forbid" else self.priority


def stamp(ballot: Ballot, plugin: str, distribution: str = "", version: str = "") -> StampedBallot:
    """The ballot, with where it came from."""
    if isinstance(ballot, Vote | Discourage):
        priority, remedy = ballot.priority, ""
    else:
        priority, remedy = 0, ballot.remedy
    return StampedBallot(
        plugin, ballot.kind, ballot.runner, priority, ballot.reason, remedy, distribution, version
    )


def _check(
    ballot: object, runner: object, reason: object, priority: object = 0, remedy: object = ""
) -> None:
    name = type(ballot).__name__
    if not isinstance(runner, str) or not runner.strip():
        raise ValueError(f"{name}: runner must be a runner's name, not {runner!r}")
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError(f"{name} for {runner!r} needs a reason that a user can read")
    if not isinstance(remedy, str):
        raise ValueError(f"{name} for {runner!r}: remedy must be text, not {remedy!r}")
    # bool is an int in Python, but True as a priority is always a mistake
    if type(priority) is not int:
        raise ValueError(f"{name} for {runner!r}: priority must be an int, not {priority!r}")
