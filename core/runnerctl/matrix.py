"""Many models under many configurations: which runner serves each. Nothing is decided anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from runnerctl.errors import UserError
from runnerctl.resolve import ModelLike, discover_host, resolve

if TYPE_CHECKING:
    from runnerctl.config.facts import ModelFacts
    from runnerctl.decision import Decision
    from runnerctl.plugins import PluginHost
    from runnerctl.problems import Problem


@dataclass(frozen=True, slots=True)
class Column:
    """A configuration: a name to show, the flags that make it, and what they mean.

    Attributes:
        settings: as for `resolve`.
        config_file: a YAML file of settings.
    """

    name: str
    flags: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    config_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A model, and what was decided about it for each column by name."""

    name: str
    decisions: Mapping[str, Decision]

    @property
    def facts(self) -> ModelFacts | None:
        """What the model is; plugins of a column may see it otherwise: this is the first's."""
        return next(iter(self.decisions.values())).facts if self.decisions else None

    @property
    def kind(self) -> str:
        """What the model is in a word or two, as `hybrid MoE`."""
        return kind_of(self.facts)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The columns, the rows, and what was found wrong with plugins on the way."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...] = ()


def build_matrix(models: Mapping[str, ModelLike], columns: Sequence[Column]) -> Matrix:
    """Decide about every model under every configuration.

    Args:
        models: by the name to show.
        columns: their names are different.

    Raises:
        UserError: settings of a column that are wrong, or a model that cannot be read.
    """
    hosts: list[PluginHost] = []
    problems: dict[Problem, None] = {}
    for column in columns:
        host, found = discover_host(
            source="command line", config_file=column.config_file, **column.settings
        )
        check(found, f"column {column.name!r}: ")
        problems |= dict.fromkeys(found)
        hosts.append(host)
    rows = []
    for name, model in models.items():
        decisions = {
            column.name: _decide(model, column, host)
            for column, host in zip(columns, hosts, strict=True)
        }
        rows.append(Row(name, decisions))
    return Matrix(tuple(columns), tuple(rows), tuple(problems))


def default_columns(
    column: Callable[[str, str], Column], runners: Iterable[str]
) -> tuple[Column, ...]:
    """No flags, each runner by name, and two ranks of each kind of parallelism.

    Args:
        column: makes one from a name and flags.
        runners: the names of all runners there are.
    """
    named = [(name, f"--runner {quote(name)}") for name in sorted(runners)]
    parallel = [
        ("TP 2", "--tensor-parallel-size 2"),
        ("PCP 2", "--prefill-context-parallel-size 2"),
    ]
    return tuple(column(name, flags) for name, flags in [("default", ""), *named, *parallel])


@cache
def families() -> Mapping[str, Mapping[str, Any]]:
    """Well-known architectures by model type, each with what counts of its default config."""
    text = files("runnerctl.config").joinpath("families.json").read_text("utf-8")
    return {config["model_type"]: config for config in json.loads(text)}


def kind_of(facts: ModelFacts | None) -> str:
    """What a model is in a word or two; with a question mark if that is not sure."""
    if facts is None:
        return "unknown"
    words = {
        "pooling": facts.runner_type == "pooling",
        "enc-dec": facts.is_encoder_decoder,
        "multimodal": facts.is_multimodal,
        "hybrid": facts.is_hybrid,
        "attention-free": facts.is_attention_free,
        "MLA": facts.is_mla,
        "MoE": facts.is_moe,
    }
    named = " ".join(word for word, holds in words.items() if holds) or "dense"
    return f"{named}?" if facts.uncertain else named


def _decide(model: ModelLike, column: Column, host: PluginHost) -> Decision:
    resolved = resolve(
        model,
        host=host,
        source="command line",
        config_file=column.config_file,
        **column.settings,
    )
    if resolved.reference is None:
        check(resolved.decision.errors)
    return resolved.decision


def check(problems: Iterable[Problem], where: str = "") -> None:
    """Stop at an error.

    Args:
        problems: what was found.
        where: goes before the message.

    Raises:
        UserError: the first error among them.
    """
    for problem in problems:
        if problem.severity == "error":
            message = where + problem.message
            raise UserError(message, remedy=problem.remedy, setting=problem.setting)
