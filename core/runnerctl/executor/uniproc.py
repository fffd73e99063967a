"""The executor for one rank: the runner lives in this process."""

from __future__ import annotations

from runnerctl.executor.make_runner import make_runner
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel, WorkerContext
from runnerctl.runner.spec import RunnerSpec
from runnerctl.runner.step import StepHandle, StepPlan


class UniprocExecutor:
    """Makes the runner that the Decision names and hands it steps. See `Executor`.

    Raises:
        PluginError: the factory that the runner's plugin named cannot be imported.
    """

    def __init__(self, spec: RunnerSpec, context: WorkerContext) -> None:
        self._runner = make_runner(spec, context)

    def load(self) -> tuple[LoadedModel, KVCacheSpec]:
        """See `Executor.load`."""
        return self._runner.load(), self._runner.kv_cache_spec()

    def start(self, num_blocks: int, max_model_len: int) -> None:
        """See `Executor.start`."""
        self._runner.initialize_kv_cache(num_blocks, max_model_len)
        self._runner.warm_up()

    def execute(self, plan: StepPlan) -> StepHandle:
        """See `Executor.execute`."""
        return self._runner.execute(plan)

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        self._runner.shutdown()
