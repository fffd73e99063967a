"""What a configuration needs of a runner, and the host's own veto where a runner lacks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from runnerctl.ballots import Forbid, StampedBallot, stamp
from runnerctl.config import EngineConfig, ModelFacts
from runnerctl.config.attention_interface import why_not_paged
from runnerctl.decision import Need, PluginRecord
from runnerctl.runner.spec import CAPABILITIES, RunnerSpec

# fact -> capability, in the order in which needs are listed
_FACTS = {
    "is_moe": "moe",
    "is_mla": "mla",
    "is_hybrid": "hybrid",
    "is_attention_free": "attention_free",
    "is_encoder_decoder": "encoder_decoder",
    "is_multimodal": "multimodal",
}
_PARALLEL = {
    "tensor_parallel_size": "tp",
    "prefill_context_parallel_size": "pcp",
}


def needs_of(config: EngineConfig) -> tuple[Need, ...]:
    """The capabilities this configuration needs, each with the fact or setting behind it.

    A configuration without facts (its model could not be read) has only the needs of
    its settings.
    """
    needs = []
    facts = config.facts
    if facts is not None:
        usual = "the model generates text" if facts.runner_type == "generate" else None
        needs.append(Need(facts.runner_type, usual or _because(facts, "runner_type")))
        needs += [
            Need(capability, _because(facts, fact))
            for fact, capability in _FACTS.items()
            if getattr(facts, fact)
        ]
        needs += _needs_of_code(facts)
    for name, capability in _PARALLEL.items():
        size = getattr(config.parallel, name)
        if size > 1:
            where = config.where(name)
            needs.append(Need(capability, f"{where} is {size}", where))
    return tuple(needs)


def capability_forbids(
    needs: Sequence[Need],
    runners: Mapping[str, RunnerSpec],
    provider: Callable[[str], PluginRecord],
) -> list[StampedBallot]:
    """The host's own `Forbid` for every runner that lacks something, listing all it lacks.

    Each is stamped with the plugin that provides the runner, and marked `by_host`.
    """
    ballots = []
    for name in sorted(runners):
        offered = runners[name].capabilities
        missing = [need for need in needs if need.capability not in offered]
        if missing:
            record = provider(name)
            forbid = Forbid(name, _lacks(missing), _remedy(missing))
            stamped = stamp(forbid, record.name, record.distribution, record.version)
            ballots.append(stamped._replace(by_host=True))
    return ballots


def _because(facts: ModelFacts, fact: str) -> str:
    said = facts.evidence.get(fact)
    if said is None:
        return "the model is of this kind"
    return said if fact in facts.supplied_by else f"the model's config says {said}"


def _needs_of_code(facts: ModelFacts) -> list[Need]:
    """What the installed code of an architecture needs, other than its config."""
    recurrent = facts.is_hybrid or facts.is_attention_free
    if facts.runner_type != "generate" or recurrent or facts.is_encoder_decoder:
        return []
    why = why_not_paged(facts.model_type, next(iter(facts.architectures), ""))
    return [Need("unpaged", why)] if why else []


def _lacks(missing: Sequence[Need]) -> str:
    listed = ", ".join(
        f"{need.capability} ({CAPABILITIES.get(need.capability, need.capability)}; {need.reason})"
        for need in missing
    )
    return f"it lacks {listed}"


def _remedy(missing: Sequence[Need]) -> str:
    ways = [f"set {need.setting} to 1" for need in missing if need.setting]
    of_model = [need.capability for need in missing if not need.setting]
    if of_model:
        ways.append(f"use another model, or a runner that offers {', '.join(of_model)}")
    return " and ".join(ways)
