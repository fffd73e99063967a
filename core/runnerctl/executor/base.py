"""What an engine may ask of the ranks that run its model, wherever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from runnerctl.runner.protocol import KVCacheSpec, LoadedModel, WorkerContext
    from runnerctl.runner.spec import RunnerSpec
    from runnerctl.runner.step import StepHandle, StepPlan


class Executor(Protocol):
    """The way to one runner, or to one per rank. Methods are called in this order."""

    def load(self) -> tuple[LoadedModel, KVCacheSpec]:
        """Load the model; returns what it is, and the cache that each rank needs."""
        ...

    def start(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the cache on every rank and warm up."""
        ...

    def execute(self, plan: StepPlan) -> StepHandle:
        """Submit a step to every rank; never raises, errors come from the handle."""
        ...

    def shutdown(self) -> None:
        """Free what the ranks hold, and end them. Also called after a start that failed."""
        ...


def make_executor(spec: RunnerSpec, context: WorkerContext) -> Executor:
    """The executor of the decision's layout. Nothing is loaded yet.

    Raises:
        UserError: there are fewer devices here than ranks, or what runs them is not installed.
        PluginError: the factory of the runner cannot be imported.
    """
    layout = context.decision.parallel
    if layout.executor == "uni":
        from runnerctl.executor.uniproc import UniprocExecutor

        return UniprocExecutor(spec, context)
    from runnerctl.executor.group import GroupExecutor

    if layout.executor == "ray":
        from runnerctl.executor.ray import RayRanks

        return GroupExecutor(RayRanks(context, layout))
    from runnerctl.executor.multiproc import ProcessRanks

    return GroupExecutor(ProcessRanks(context, layout))
