"""Changes to a loaded model that plugins make: fuse, pack, compile. No torch here.

Applied in the worker, once. Which ones were applied, and what each says it did, is part
of what the engine knows of the model and of what `--stats` shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, get_args

from runnerctl.errors import PluginError
from runnerctl.plugin_checks import GUARDED, PluginFaultError, collect, explain, short
from runnerctl.plugin_faults import called, hook_fault
from runnerctl.suggest import block_flag, did_you_mean

if TYPE_CHECKING:
    from runnerctl.config import EngineConfig
    from runnerctl.decision import Decision, PluginRecord
    from runnerctl.plugins import PluginHost

logger = logging.getLogger(__name__)

HOOK = "transform_model"
Stage = Literal["fuse", "pack", "compile"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order in which they are applied: what is fused can be packed, and both compiled."""


@dataclass(frozen=True, slots=True)
class ModelTransform:
    """What a plugin returns from `transform_model`.

    Attributes:
        name: as `--stats` shows it.
        stage: `fuse` (fewer, larger modules), `pack` (weights in another layout or type) or
            `compile`. Within a stage the order is that of the names, then of the plugins.
        apply: changes the model in place. Returns what it did, in a few words ("packed 211
            linear layers"), or None if there was nothing to do.
    """

    name: str
    stage: Stage
    apply: Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class AppliedTransform:
    """A transform that changed the model.

    Attributes:
        stage, name: of the transform.
        plugin: whose it is.
        report: what it says it did.
    """

    stage: Stage
    name: str
    plugin: str
    report: str


def apply_transforms(
    model: Any,
    config: EngineConfig,
    decision: Decision,
    host: PluginHost,
    *,
    stages: Iterable[Stage] = STAGES,
) -> tuple[AppliedTransform, ...]:
    """Ask the plugins how to change a model, and change it, stage by stage.

    May be called several times for one model, each time for other stages: plugins are
    asked each time, about the model as it is then.

    Args:
        model: an `nn.Module` with its weights.
        config, decision: as plugins get them.
        host: whose plugins to ask.
        stages: which to apply.

    Returns:
        What was done, in order. A transform that found nothing to do is not in it.

    Raises:
        PluginError: a transform raised, and the model may be half changed; a plugin's answer
            is not what it should be; or, with strict plugins, a hook raised.
    """
    arguments = {"model": model, "config": config, "decision": decision}
    offered: list[tuple[PluginRecord, ModelTransform]] = []
    for record, implementation in host.implementations(HOOK):
        started = perf_counter()
        answers: list[ModelTransform] = []
        try:
            collect(implementation(arguments), (ModelTransform,), answers)
        except PluginFaultError as error:
            raise _fault(record, f"hook {HOOK!r} {error}") from error
        except GUARDED as error:
            strict = host.strict or config.plugins.strict_plugins
            problem = hook_fault(
                record, HOOK, error, "error" if strict else "warning", "Its transforms are left out"
            )
            if strict:
                raise PluginError(problem.message, remedy=problem.remedy) from error
            logger.warning("%s", problem)
            continue
        finally:
            host.add_time(record.name, HOOK, started)
        for transform in answers:
            _check(record, transform)
            offered.append((record, transform))
    offered.sort(key=lambda pair: (pair[1].name, pair[0].name))
    done = []
    for stage in (stage for stage in STAGES if stage in set(stages)):
        for record, transform in offered:
            if transform.stage == stage and (report := _apply(record, transform, model)):
                done.append(AppliedTransform(stage, transform.name, record.name, report))
    return tuple(done)


def _check(record: PluginRecord, transform: ModelTransform) -> None:
    if not isinstance(transform.name, str) or not transform.name.strip():
        raise _fault(record, f"a transform needs a name, not {transform.name!r}")
    if transform.stage not in STAGES:
        hint = did_you_mean(str(transform.stage), STAGES)
        raise _fault(
            record,
            f"transform {transform.name!r}: there is no stage {transform.stage!r}{hint} "
            f"(there are {', '.join(STAGES)})",
        )


def _apply(record: PluginRecord, transform: ModelTransform, model: Any) -> str | None:
    """What the transform did; None if nothing."""
    try:
        report: object = transform.apply(model)
    except GUARDED as error:
        raise _fault(
            record,
            f"transform {transform.name!r} failed, and may have left the model half changed: "
            f"{explain(error)}",
        ) from error
    if report is None:
        return None
    if not isinstance(report, str) or not report.strip():
        raise _fault(
            record,
            f"transform {transform.name!r}: apply must return what it did as text, or None "
            f"if nothing, not {short(report)}",
        )
    return report


def _fault(record: PluginRecord, why: str) -> PluginError:
    return PluginError(
        f"{called(record)}: {why}",
        remedy=f"go without it: {block_flag(record.name)}",
    )
