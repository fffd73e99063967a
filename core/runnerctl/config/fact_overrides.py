"""Facts that plugins supply, and how they change what the host read from a config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from types import EllipsisType
from typing import Any, NamedTuple, get_args

from runnerctl.config.facts import ModelFacts, RunnerType
from runnerctl.problems import Problem
from runnerctl.suggest import block_flag

_OPPOSITES = {"is_hybrid": "is_attention_free", "is_attention_free": "is_hybrid"}


@dataclass(frozen=True, slots=True)
class FactOverrides:
    """What `register_model_facts` returns: facts of one model, and how the plugin knows.

    A fact that is left out (`...`) stays as the host read it. Each means what it means in
    `ModelFacts`. A hybrid model is not attention-free, and the other way round: of these
    two, naming the true one is enough.

    Attributes:
        reason: a clause for the user: which key of the config it was read from.

    Raises:
        ValueError: an empty reason, no fact, a value of a wrong type, or a model that is
            hybrid and attention-free at once.
    """

    reason: str
    _: KW_ONLY
    is_moe: bool | EllipsisType = ...
    is_hybrid: bool | EllipsisType = ...
    is_attention_free: bool | EllipsisType = ...
    is_mla: bool | EllipsisType = ...
    is_encoder_decoder: bool | EllipsisType = ...
    is_multimodal: bool | EllipsisType = ...
    runner_type: RunnerType | EllipsisType = ...
    num_hidden_layers: int | EllipsisType | None = ...
    num_attention_heads: int | EllipsisType | None = ...
    num_key_value_heads: int | EllipsisType | None = ...
    max_position_embeddings: int | EllipsisType | None = ...

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise ValueError("FactOverrides needs a reason that a user can read")
        given = self._given()
        if not given:
            raise ValueError("FactOverrides without a fact; return None if there is none")
        for name, value in given.items():
            if expected := _wrong(name, value):
                raise ValueError(f"FactOverrides: {name} must be {expected}, not {value!r}")
        if self.is_hybrid is True and self.is_attention_free is True:
            raise ValueError("FactOverrides: a model cannot be hybrid and attention-free at once")

    def facts(self) -> dict[str, Any]:
        """The facts it speaks of, with what follows from them, in the order of the fields."""
        given = self._given()
        for name, opposite in _OPPOSITES.items():
            if given.get(name) is True:
                given[opposite] = False
        return {name: given[name] for name in FACT_NAMES if name in given}

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in FACT_NAMES}
        return {name: value for name, value in values.items() if value is not ...}


FACT_NAMES = tuple(field.name for field in fields(FactOverrides) if field.name != "reason")
"""The facts that a plugin may supply."""


class Supplied(NamedTuple):
    """Facts with the plugin that supplies them, as the host (not the plugin) says."""

    plugin: str
    overrides: FactOverrides


def merge_facts(
    facts: ModelFacts, supplied: Sequence[Supplied]
) -> tuple[ModelFacts, list[Problem]]:
    """The host's reading with the facts of plugins, which go before it.

    Args:
        facts: as the host read them.
        supplied: in any order; the outcome does not depend on it.

    Returns:
        the facts, where each that changed has its plugins in `supplied_by` and in
        `evidence`; and an error for each fact on which plugins contradict each other,
        which stays as the host read it.
    """
    changed: dict[str, Any] = {}
    evidence, supplied_by = dict(facts.evidence), dict(facts.supplied_by)
    problems = []
    for name in FACT_NAMES:
        about = sorted((s for s in supplied if name in s.overrides.facts()), key=_by_plugin)
        values = sorted({one.overrides.facts()[name] for one in about}, key=repr)
        if len(values) > 1:
            problems.append(_contradiction(name, values, about))
        elif values and values[0] != getattr(facts, name):
            plugins = ", ".join(dict.fromkeys(one.plugin for one in about))
            reasons = "; ".join(dict.fromkeys(one.overrides.reason.strip() for one in about))
            changed[name], supplied_by[name] = values[0], plugins
            evidence[name] = f"{plugins} says: {reasons}"
    return replace(facts, **changed, evidence=evidence, supplied_by=supplied_by), problems


def known_facts(supplied: Sequence[Supplied]) -> Collection[str]:
    """The facts that some plugin speaks of."""
    return {name for one in supplied for name in one.overrides.facts()}


def plain_copy(value: Any, depth: int = 64) -> Any:
    """A copy of what JSON can hold: changing it changes nothing else. Other values as they are."""
    if depth == 0:
        return value
    if isinstance(value, Mapping):
        return {key: plain_copy(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(item, depth - 1) for item in value]
    return value


def _by_plugin(one: Supplied) -> tuple[str, str]:
    return one.plugin, one.overrides.reason


def _contradiction(name: str, values: Sequence[Any], about: Sequence[Supplied]) -> Problem:
    sides = {
        value: [one for one in about if one.overrides.facts()[name] == value] for value in values
    }
    said = "; ".join(
        f"{one.plugin} says it is {value!r} ({one.overrides.reason.strip()})"
        for value, side in sides.items()
        for one in side
    )
    ways = []
    for value, side in sides.items():
        kept = {one.plugin for one in side}
        others = dict.fromkeys(one.plugin for one in about if one.plugin not in kept)
        if others:
            ways.append(f"pass {' '.join(block_flag(p) for p in others)} to take {value!r}")
    blocked = dict.fromkeys(block_flag(one.plugin) for one in about)
    remedy = ", or ".join(ways) or f"update the plugin, or block it with {' '.join(blocked)}"
    return Problem("error", f"plugins contradict each other on {name}: {said}", remedy=remedy)


def _wrong(name: str, value: object) -> str:
    """What `value` should have been; "" if it may stand."""
    if name.startswith("is_"):
        return "" if isinstance(value, bool) else "true or false"
    if name == "runner_type":
        return "" if value in get_args(RunnerType) else " or ".join(get_args(RunnerType))
    # type(): True is no number of layers
    fits = value is None or (type(value) is int and value > 0)
    return "" if fits else "a whole number above 0, or None"
