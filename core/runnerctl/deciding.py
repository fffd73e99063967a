"""From a configuration to a `Decision`: needs, ballots, count, validation. Once, at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runnerctl.config import EngineConfig
from runnerctl.decision import Decision, ExplicitChoice
from runnerctl.needs import capability_forbids, needs_of
from runnerctl.parallel import ParallelLayout
from runnerctl.plugins import PluginHost
from runnerctl.problems import Problem
from runnerctl.runner.attention.outlook import attention_outlook
from runnerctl.selection import count


def decide_config(
    config: EngineConfig, host: PluginHost, *, problems: Sequence[Problem] = ()
) -> Decision:
    """Decide which runner serves `config`. Never raises on a bad configuration.

    Args:
        config: the resolved configuration.
        host: the plugins to ask.
        problems: what was found wrong while the configuration was resolved; these come
            first in the Decision.

    Returns:
        the Decision; `runner` is None if errors leave no choice.
    """
    strict = config.plugins.strict_plugins
    found = [*problems, *host.problems]
    needs = needs_of(config)
    # a pooling model has no KV cache that a backend would read
    pools = config.facts is not None and config.facts.runner_type == "pooling"
    decision = Decision(
        runner=None,
        explicit=_explicit(config),
        facts=config.facts,
        needs=needs,
        capabilities={name: tuple(sorted(s.capabilities)) for name, s in host.runners.items()},
        plugins=host.records,
        attention=() if pools else attention_outlook(config, host.attention_backends),
        parallel=ParallelLayout.of(config),
    )
    if config.facts is None:
        if not any(problem.severity == "error" for problem in found):
            found.append(_unreadable(config))
        return replace(decision, problems=tuple(found))

    found += [Problem("note", sentence) for sentence in config.facts.uncertain]
    ballots, faults = host.ballots(config, strict=strict)
    ballots += capability_forbids(needs, host.runners, host.provider)
    unavailable = [record for record in host.records if record.status != "active"]
    outcome = count(ballots, host.runners, decision.explicit, strict or host.strict, unavailable)
    found += [*faults, *outcome.problems]
    decision = replace(
        decision, runner=outcome.runner, ballots=outcome.ballots, problems=tuple(found)
    )
    if outcome.runner is None:
        return decision
    found += host.validate(config, decision, strict=strict)
    return replace(decision, problems=tuple(found))


def _explicit(config: EngineConfig) -> ExplicitChoice | None:
    runner = config.runner.runner
    if runner == "auto":
        return None
    origin = config.origin("runner")
    return ExplicitChoice(runner, origin.source, origin.setting)


def _unreadable(config: EngineConfig) -> Problem:
    return Problem(
        "error",
        f"what kind of model {config.model.model!r} is could not be read",
        remedy="name a folder or file with a readable config.json",
        setting=config.where("model"),
    )
