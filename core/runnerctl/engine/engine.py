"""The engine loop: schedule, execute, update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from runnerctl.engine.block_pool import BlockPool
from runnerctl.engine.cache_size import cache_size
from runnerctl.engine.outputs import FinishReason
from runnerctl.engine.request import Request
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.engine.scheduler import Scheduler
from runnerctl.engine.stats import EngineStats, prefill_tokens
from runnerctl.executor.uniproc import UniprocExecutor
from runnerctl.runner.protocol import WorkerContext
from runnerctl.runner.spec import RunnerSpec


class Engine:
    """Token ids in, token ids out. Text is `LLM`'s business.

    Args:
        spec: of the runner that the Decision names.
        context: what the runner is made from.
        eos_token_ids: tokens that end a request unless it ignores them.

    Raises:
        UserError: the model cannot be loaded, or does not fit. Nothing stays allocated.

    Attributes:
        counts: see `stats`, which completes them.
    """

    def __init__(
        self, spec: RunnerSpec, context: WorkerContext, eos_token_ids: frozenset[int]
    ) -> None:
        config = context.config
        self._eos_token_ids = eos_token_ids
        self.counts = EngineStats()
        self._executor = UniprocExecutor(spec, context)
        try:
            self.model, kv_cache_spec = self._executor.load()
            self.cache_size = cache_size(config, self.model.max_model_len, kv_cache_spec)
            self._executor.start(self.cache_size.num_blocks, self.cache_size.max_model_len)
        except BaseException:
            self._executor.shutdown()
            raise
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            BlockPool(self.cache_size.num_blocks),
            resumes_as_new=spec.resumes_as_new,
        )

    @property
    def has_unfinished_requests(self) -> bool:
        """True while a call of `step` would do something."""
        return bool(self.scheduler.requests)

    def new_request(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling_params: SamplingParams
    ) -> Request:
        """A request that is not queued yet. Its prompt was checked, and its seed is set."""
        return Request(
            request_id,
            prompt_token_ids,
            sampling_params,
            eos_token_ids=self._eos_token_ids,
            max_total_tokens=self.cache_size.max_model_len,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request behind the others."""
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Compute one step; returns the requests that got a token.

        Raises:
            Exception: whatever the step raised; all requests are aborted then, so that
                none waits for a token that will not come.
        """
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        self.counts.peak_blocks_used = max(self.counts.peak_blocks_used, self._num_blocks_used)
        num_prefill_tokens = prefill_tokens(plan, self.scheduler)
        try:
            updated = self.scheduler.update(plan, self._executor.execute(plan).result())
        except BaseException:
            self.scheduler.abort_all(plan)
            raise
        if plan.num_scheduled_tokens:
            self.counts.count_step(
                num_prefill_tokens,
                num_requests=len(plan.num_scheduled_tokens),
                num_generated=len(updated),
                seconds=time.perf_counter() - started,
            )
        return updated

    def stats(self) -> EngineStats:
        """What this engine has done so far."""
        return replace(
            self.counts,
            num_preemptions=self.scheduler.num_preemptions,
            num_blocks=self.scheduler.pool.num_blocks,
            num_blocks_used=self._num_blocks_used,
        )

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside, queued or not: a stop string, or an abort."""
        self.scheduler.finish(request, reason)

    def shutdown(self) -> None:
        """Free the runner and its memory."""
        self._executor.shutdown()

    @property
    def _num_blocks_used(self) -> int:
        pool = self.scheduler.pool
        return pool.num_blocks - pool.num_free_blocks
