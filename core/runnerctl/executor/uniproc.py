"""The executor for one rank: the runner lives in this process."""

from __future__ import annotations

from importlib import import_module

from runnerctl.errors import PluginError
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel, ModelRunner, WorkerContext
from runnerctl.runner.spec import RunnerSpec
from runnerctl.runner.step import StepHandle, StepPlan


class UniprocExecutor:
    """Makes the runner that the Decision names and hands it steps.

    Raises:
        PluginError: the factory that the runner's plugin named cannot be imported.
    """

    def __init__(self, spec: RunnerSpec, context: WorkerContext) -> None:
        self._runner = _make_runner(spec, context)

    def load(self) -> tuple[LoadedModel, KVCacheSpec]:
        """Load the model; returns what it is and the cache it needs."""
        return self._runner.load(), self._runner.kv_cache_spec()

    def start(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the cache and warm up."""
        self._runner.initialize_kv_cache(num_blocks, max_model_len)
        self._runner.warm_up()

    def execute(self, plan: StepPlan) -> StepHandle:
        """Submit a step."""
        return self._runner.execute(plan)

    def shutdown(self) -> None:
        """Free what the runner holds."""
        self._runner.shutdown()


def _make_runner(spec: RunnerSpec, context: WorkerContext) -> ModelRunner:
    module, _, attribute = spec.factory.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"runner {spec.name!r} cannot be made: {spec.factory} does not import ({error})",
            remedy="install what it needs (runnerctl[engine]) or choose another --runner",
        ) from error
    runner: ModelRunner = factory(context)
    return runner
