"""`Decision`: which runner serves a configuration and why, as one frozen value.

It is made once, at start, and passed along: scheduler, executor and workers read
it and none of them decides again. `to_json` is what `runnerctl explain --format
json` prints, and `from_json` reads it back equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

from runnerctl.ballots import BallotKind
from runnerctl.config.facts import ModelFacts
from runnerctl.parallel import ParallelLayout
from runnerctl.problems import Problem

if TYPE_CHECKING:
    from pydantic import TypeAdapter

BallotStatus = Literal["decisive", "overridden", "moot"]
PluginStatus = Literal["active", "blocked", "failed"]


@dataclass(frozen=True, slots=True)
class CountedBallot:
    """A ballot after the count: who cast it, and what became of it.

    Attributes:
        plugin, distribution, version: stamped by the host, not by the plugin.
        kind, runner, reason, priority, remedy: the ballot. Hard ballots have no
            priority; soft ones no remedy.
        status: `decisive` (the outcome rests on it), `overridden` (it wished for
            something that `overridden_by` beat: plugins, the host, the user's choice, the
            fallback) or `moot` (no bearing: the outcome stays the same if every moot ballot
            is taken away).
        note: why a moot ballot is moot, where that is not plain.
        by_host: the host itself cast it, because the runner lacks a capability; `plugin`
            is the one that provides the runner.
    """

    plugin: str
    distribution: str
    version: str
    kind: BallotKind
    runner: str
    reason: str
    priority: int | None
    remedy: str = ""
    status: BallotStatus = "moot"
    overridden_by: str | None = None
    note: str = ""
    by_host: bool = False


@dataclass(frozen=True, slots=True)
class ExplicitChoice:
    """A runner that the user asked for by name.

    Attributes:
        runner: the name.
        source: the kind of place it was set: `command line`, `python`, `file`,
            `environment` ...
        setting: how the user spelled it there, e.g. `--runner`.
    """

    runner: str
    source: str
    setting: str


@dataclass(frozen=True, slots=True)
class Need:
    """A capability the configuration needs, and the setting or model fact behind it."""

    capability: str
    reason: str
    setting: str | None = None


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin at load.

    Attributes:
        name: its entry-point name.
        distribution, version: the installed package it came from.
        status: `active`, `blocked` (by `-p no:NAME` or not on the allow list) or `failed`.
        hooks: the hooks it implements, sorted.
        error: why it failed or was blocked.
    """

    name: str
    distribution: str
    version: str
    status: PluginStatus
    hooks: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class AttentionOutlook:
    """One attention backend, as far as it is known before a model is loaded.

    Attributes:
        name: of the backend.
        plugin: whose it is; "" for those that come with core.
        passed_over: why it will not be tried; "" if it will, in its turn.
        note: what else there is to know.
    """

    name: str
    plugin: str = ""
    passed_over: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a selection with everything that led to it.

    Attributes:
        runner: the chosen runner, or None if there are errors that leave no choice.
        explicit: the user's own choice, if there was one.
        ballots: every ballot, in an order that does not depend on registration.
        problems: errors, warnings and notes of the host and of all plugins.
        facts: what the model is, or None if its config could not be read.
        needs: the capabilities this configuration needs.
        capabilities: what each registered runner offers, by runner name.
        plugins: every plugin that was found, in name order.
        attention: the attention backends, in the order in which a worker tries them; none for
            a pooling model.
        parallel: the ranks that share the work, and what runs them.
    """

    runner: str | None
    explicit: ExplicitChoice | None = None
    ballots: tuple[CountedBallot, ...] = ()
    problems: tuple[Problem, ...] = ()
    facts: ModelFacts | None = None
    needs: tuple[Need, ...] = ()
    capabilities: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    plugins: tuple[PluginRecord, ...] = ()
    attention: tuple[AttentionOutlook, ...] = ()
    parallel: ParallelLayout = field(default_factory=ParallelLayout)

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that stop a start."""
        return tuple(p for p in self.problems if p.severity == "error")

    @property
    def ok(self) -> bool:
        """True if a runner was chosen and nothing stands in its way."""
        return self.runner is not None and not self.errors

    def to_json(self, *, indent: int | None = 2) -> str:
        """The whole decision as JSON; `from_json` gives back an equal value.

        Only what UTF-8 cannot hold is lost: an undecodable byte of a file's name reads `?`.
        """
        plain = _adapter().dump_python(self, mode="json")
        text = json.dumps(plain, indent=indent, ensure_ascii=False)
        return text.encode(errors="replace").decode()

    @staticmethod
    def from_json(text: str | bytes) -> Decision:
        """Read what `to_json` wrote.

        Raises:
            pydantic.ValidationError: the text is not a Decision.
        """
        return _adapter().validate_json(text)


@cache
def _adapter() -> TypeAdapter[Decision]:
    # pydantic builds the schema in some milliseconds: only for those who ask for JSON
    from pydantic import TypeAdapter

    return TypeAdapter(Decision)
