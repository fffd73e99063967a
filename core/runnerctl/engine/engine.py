"""The engine loop: schedule, execute, update, with as many steps in flight as the runner allows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from runnerctl.engine.block_pool import BlockPool
from runnerctl.engine.cache_size import cache_size
from runnerctl.engine.outputs import FinishReason
from runnerctl.engine.pooling_scheduler import PoolingScheduler, size_without_cache
from runnerctl.engine.request import Request
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.engine.scheduler import Scheduler
from runnerctl.engine.stats import EngineStats
from runnerctl.executor.base import make_executor
from runnerctl.parallel import ParallelLayout, batches_in_flight
from runnerctl.runner.protocol import WorkerContext
from runnerctl.runner.spec import RunnerSpec
from runnerctl.runner.step import StepHandle


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
        self._max_in_flight = batches_in_flight(spec)
        # of the scheduler's steps in flight, oldest first
        self._handles: deque[StepHandle] = deque()
        # time up to here is in the counts
        self._counted_until = 0.0
        layout = context.decision.parallel
        self._ranks = "" if layout == ParallelLayout() else layout.summary
        self._executor = make_executor(spec, context)
        try:
            self.model, kv_cache_spec = self._executor.load()
            self.cache_size = (
                size_without_cache(config, self.model)
                if self.model.pooling
                else cache_size(config, self.model.max_model_len, kv_cache_spec)
            )
            self._executor.start(self.cache_size.num_blocks, self.cache_size.max_model_len)
        except BaseException:
            self._executor.shutdown()
            raise
        cache = config.cache
        if not self.model.can_share_prefixes:
            cache = cache.model_copy(update={"enable_prefix_caching": False})
        self.scheduler: Scheduler | PoolingScheduler = (
            PoolingScheduler(config.scheduler)
            if self.model.pooling
            else Scheduler(
                config.scheduler,
                cache,
                BlockPool(self.cache_size.num_blocks),
                resumes_as_new=spec.resumes_as_new,
            )
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
        """Submit what may be in flight, then wait for the oldest step.

        Returns:
            The requests that got a token, or their result, from it. When none is left,
            nothing is in flight either.

        Raises:
            Exception: whatever the step raised; all requests are aborted then, so that
                none waits for a token that will not come.
        """
        if not self._handles:
            self._counted_until = time.perf_counter()
        try:
            self._submit()
            updated = self._take_oldest()
        except BaseException:
            self._abort_all()
            raise
        self._drain_if_idle()
        return updated

    def stats(self) -> EngineStats:
        """What this engine has done so far."""
        return replace(
            self.counts,
            num_preemptions=self.scheduler.num_preemptions,
            num_blocks=self.scheduler.pool.num_blocks,
            num_blocks_used=self._num_blocks_used,
            attention_backend=self.model.attention_backend,
            transforms=self.model.transforms,
            dtype=self.model.dtype,
            pooling=self.model.pooling.method if self.model.pooling else "",
            ranks=self._ranks,
            note=self.model.note,
        )

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside, queued or not: a stop string, or an abort.

        With the last one, the steps that are still in flight are waited for.
        """
        self.scheduler.finish(request, reason)
        self._drain_if_idle()

    def shutdown(self) -> None:
        """Free the runner and its memory; steps in flight are waited for."""
        try:
            self._await_handles()
        finally:
            self._executor.shutdown()

    def _submit(self) -> None:
        """Hand out steps until enough are in flight, or the next one depends on their results."""
        while len(self._handles) < self._max_in_flight:
            plan = self.scheduler.schedule()
            if plan is None:
                return
            self._handles.append(self._executor.execute(plan))
            self.counts.peak_blocks_used = max(self.counts.peak_blocks_used, self._num_blocks_used)

    def _take_oldest(self) -> list[Request]:
        """Wait for the oldest step, and take in its tokens."""
        try:
            result = self._handles[0].result()
        except Exception:
            self._handles.popleft()
            raise
        self._handles.popleft()
        step = self.scheduler.in_flight[0]
        updated = self.scheduler.update(result)
        now = time.perf_counter()
        if step.entries:
            self.counts.count_step(
                step.num_prefill_tokens,
                num_requests=len(step.entries),
                num_generated=0 if self.model.pooling else len(updated),
                seconds=now - self._counted_until,
            )
        self._counted_until = now
        return updated

    def _drain_if_idle(self) -> None:
        """Wait for steps in flight whose requests have all ended, so that no block is held.

        Their errors are nobody's: what was asked for is there, and the next step tells.
        """
        while self._handles and not self.scheduler.requests:
            try:
                self._take_oldest()
            except BaseException as error:
                self._abort_all()
                if not isinstance(error, Exception):
                    raise

    def _abort_all(self) -> None:
        """After an error or an interrupt: end all requests, once no step runs any more."""
        try:
            self._await_handles()
        finally:
            self._handles.clear()
            self.scheduler.abort_all()

    def _await_handles(self) -> None:
        """Wait until nothing is in flight, whatever comes of it."""
        while self._handles:
            # A call of `result` that was interrupted is made again: the step still runs.
            with suppress(Exception):
                self._handles[0].result()
            self._handles.popleft()

    @property
    def _num_blocks_used(self) -> int:
        pool = self.scheduler.pool
        return pool.num_blocks - pool.num_free_blocks
