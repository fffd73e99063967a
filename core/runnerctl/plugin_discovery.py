"""Which installed plugins there are, and which of them may load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from packaging.utils import canonicalize_name

from runnerctl.hookspecs import ENTRY_POINT_GROUP
from runnerctl.problems import Problem
from runnerctl.suggest import block_flag, did_you_mean


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry point of the plugin group, not imported yet."""

    name: str
    distribution: str
    version: str
    load: Callable[[], object]

    @property
    def builtin(self) -> bool:
        """True for what runnerctl itself ships."""
        return is_builtin(self.distribution)


def is_builtin(distribution: str) -> bool:
    """True for the distribution that holds the host."""
    return canonicalize_name(distribution) == "runnerctl"


def fold(name: str) -> str:
    """A plugin's name as it is compared."""
    return name.strip().casefold()


def installed() -> list[Candidate]:
    """All entry points of the group, in name order; nothing is imported."""
    found = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        dist = point.dist
        # metadata of a half-removed distribution may lack either
        name = (dist.name if dist else None) or "unknown"
        version = (dist.version if dist else None) or "unknown"
        found.append(Candidate(fold(point.name), name, version, point.load))
    return sorted(found, key=lambda c: (c.name, c.distribution, c.version))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user said about plugins.

    Attributes:
        required: names that must load (`-p X`).
        blocked: names that must not be imported (`-p no:X`).
        allowed: the only third-party plugins that may load, or None for all.
        plugins_setting, allowed_setting: how the user spelled the two settings.
    """

    required: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    plugins_setting: str = "-p"
    allowed_setting: str = "RUNNERCTL_PLUGINS"

    @staticmethod
    def of(
        plugins: Iterable[str],
        allowed: Sequence[str] | None,
        plugins_setting: str = "-p",
        allowed_setting: str = "RUNNERCTL_PLUGINS",
    ) -> Wishes:
        """Read the two settings; names are stripped and case-folded, empty ones dropped."""
        required, blocked = set(), set()
        for word in map(fold, plugins):
            if word.startswith("no:"):
                blocked.add(fold(word.removeprefix("no:")))
            else:
                required.add(word)
        only = None if allowed is None else frozenset(map(fold, allowed)) - {""}
        return Wishes(
            frozenset(required) - {""},
            frozenset(blocked) - {""},
            only,
            plugins_setting,
            allowed_setting,
        )

    def blocking(self, name: str) -> str:
        """How the user blocked a plugin."""
        if self.plugins_setting == "-p":
            return block_flag(name)
        return f"{self.plugins_setting} says no:{name}"

    def block_reason(self, candidate: Candidate) -> str:
        """Why this plugin must not be imported; empty if it may."""
        if candidate.name in self.blocked:
            return self.blocking(candidate.name)
        # a plugin asked for by name is allowed by that
        may_load = self.allowed is None or candidate.name in self.allowed | self.required
        if not (may_load or candidate.builtin):
            return f"not on the allow list {self.allowed_setting}"
        return ""

    def problems(self, known: Iterable[str]) -> list[Problem]:
        """Names that nobody provides, and names that are wanted and blocked at once."""
        known = frozenset(known)
        found = [
            Problem(
                "error",
                f"plugin {name!r} is both asked for and blocked",
                remedy=f"remove {name!r} or 'no:{name}'",
                setting=self.plugins_setting,
            )
            for name in sorted(self.required & self.blocked)
        ]
        remedy = (
            "correct the name or install the plugin; `runnerctl plugins list` shows what is there"
        )
        asked = [(n, self.plugins_setting) for n in sorted(self.required - known)]
        asked += [(n, self.allowed_setting) for n in sorted((self.allowed or frozenset()) - known)]
        for name, setting in asked:
            message = f"no installed plugin is called {name!r}{did_you_mean(name, known)}"
            found.append(Problem("error", message, remedy=remedy, setting=setting))
        for name in sorted(self.blocked - known):
            message = f"there is no plugin {name!r} to block{did_you_mean(name, known)}"
            found.append(Problem("warning", message, setting=self.plugins_setting))
        return found


def clashes(candidates: Sequence[Candidate]) -> dict[Candidate, str]:
    """Third-party entry points whose name another distribution uses too, each with the reason.

    A built-in plugin keeps its name; of two third-party ones neither may load, since
    which one is meant would be a guess.
    """
    by_name: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_name.setdefault(candidate.name, []).append(candidate)
    return {
        candidate: "the entry-point name is used more than once: "
        + ", ".join(f"{c.distribution} {c.version}" for c in same)
        for same in by_name.values()
        if len(same) > 1
        for candidate in same
        if not candidate.builtin
    }
