"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase: a request has known tokens and
computed tokens, and every step lets the second catch up with the first, within a
budget (continuous batching after Orca, OSDI 2022; chunked prefill after
Sarathi-Serve, OSDI 2024). A request one token behind is decoding; those go first.
"""

from __future__ import annotations

from collections import deque

from runnerctl.config.engine_config import CacheSection, SchedulerSection
from runnerctl.engine.block_pool import BlockPool
from runnerctl.engine.outputs import FinishReason
from runnerctl.engine.request import Request, RequestStatus
from runnerctl.runner.step import CachedRequest, NewRequest, StepPlan, StepResult


class Scheduler:
    """One queue, one block pool. Knows no runner, only whether resumed requests come as new."""

    def __init__(
        self,
        scheduler: SchedulerSection,
        cache: CacheSection,
        pool: BlockPool,
        *,
        resumes_as_new: bool,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        # in order of arrival, always: who is preempted last comes back first
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._limits = scheduler
        self._block_size = cache.block_size
        self._prefix_caching = cache.enable_prefix_caching
        self._resumes_as_new = resumes_as_new
        self._step_id = 0
        self._finished_ids: set[str] = set()

    def add(self, request: Request) -> None:
        """Queue a request behind the others."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Plan the next step; an empty plan if there is nothing to do."""
        step = _Step(budget=self._limits.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.out_of_memory:
            self._admit_waiting(step)
        plan = StepPlan(
            step_id=self._step_id,
            new_requests=tuple(step.new),
            cached_requests=tuple(step.cached),
            num_scheduled_tokens=step.num_scheduled_tokens,
            finished_request_ids=frozenset(self._finished_ids),
            preempted_request_ids=frozenset(step.preempted_ids),
        )
        self._finished_ids.clear()
        self._step_id += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take in a step's tokens; returns the requests that got one.

        A request that ended is finished here. Requests that were aborted while the
        step ran are skipped.
        """
        updated = []
        for request_id in plan.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue
            self._index_full_blocks(request)
            if request_id in result.prompt_logprobs:
                request.add_prompt_logprobs(*result.prompt_logprobs[request_id])
            token_id = result.sampled_token_ids.get(request_id)
            if token_id is not None:
                request.append(token_id)
                if request_id in result.logprobs:
                    request.logprobs.append(result.logprobs[request_id])
                updated.append(request)
                if request.finish_reason is not None:
                    self.finish(request, request.finish_reason)
        return updated

    def abort_all(self, failed: StepPlan) -> None:
        """End all requests after a step that raised.

        How far the runner got is not known, so what `failed` told it to forget is told again.
        """
        self._finished_ids |= failed.finished_request_ids
        for request in list(self.requests.values()):
            self.finish(request, "abort")

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, whatever its state, and free its blocks; once it is ended, do nothing."""
        if request.status is RequestStatus.FINISHED:
            return
        if self.requests.pop(request.request_id, None) is not None:
            is_running = request.status is RequestStatus.RUNNING
            (self.running if is_running else self.waiting).remove(request)
            self._finished_ids.add(request.request_id)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def _schedule_running(self, step: _Step) -> None:
        # Arrival order is decodes first, and the budget has a token for each: only what it
        # leaves over is admitted, so all but the last of `running` have caught up.
        for request in list(self.running):
            if step.budget == 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an earlier one of this loop
            num_tokens = min(request.num_uncomputed_tokens, step.budget)
            num_blocks = self._num_blocks_short(request, request.num_computed_tokens + num_tokens)
            if not self._make_room(num_blocks, request, step):
                continue
            blocks = self.pool.allocate(num_blocks)
            request.block_ids += blocks
            step.cached.append(
                CachedRequest(request.request_id, tuple(blocks), request.num_computed_tokens)
            )
            self._take(step, request, num_tokens)

    def _make_room(self, num_blocks: int, request: Request, step: _Step) -> bool:
        """Preempt requests that came after `request`, latest first, until `num_blocks` are free.

        Those that are part of this step stay. If that is not enough, `request` sits
        this step out. The oldest request can take the blocks of all others, so
        somebody always goes on.
        """
        while self.pool.num_free_blocks < num_blocks:
            step.out_of_memory = True
            later = self.running[self.running.index(request) + 1 :]
            victims = [r for r in later if r.request_id not in step.num_scheduled_tokens]
            if not victims:
                return False
            self._preempt(victims[-1])
            step.preempted_ids.add(victims[-1].request_id)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_indexed_blocks = 0
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        request.num_preemptions += 1

    def _admit_waiting(self, step: _Step) -> None:
        while self.waiting and step.budget and len(self.running) < self._limits.max_num_seqs:
            request = self.waiting[0]
            prefix = self._find_prefix(request)
            num_computed_tokens = len(prefix) * self._block_size
            # The budget counts what is left after the hit, for resumed requests too.
            num_tokens = min(request.num_tokens - num_computed_tokens, step.budget)
            num_blocks = self._blocks_for(num_computed_tokens + num_tokens) - len(prefix)
            if num_blocks + self.pool.num_free_among(prefix) > self.pool.num_free_blocks:
                return
            self.waiting.popleft()
            self.pool.hold(prefix)
            request.block_ids = prefix + self.pool.allocate(num_blocks)
            request.num_computed_tokens = num_computed_tokens
            request.num_indexed_blocks = len(prefix)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_computed_tokens
            self._announce(step, request)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self._take(step, request, num_tokens)

    def _announce(self, step: _Step, request: Request) -> None:
        block_ids = tuple(request.block_ids)
        if request.status is RequestStatus.PREEMPTED and not self._resumes_as_new:
            cached = CachedRequest(
                request.request_id, block_ids, request.num_computed_tokens, resumed=True
            )
            step.cached.append(cached)
            return
        step.new.append(
            NewRequest(
                request.request_id,
                tuple(request.token_ids),
                request.sampling_params,
                request.num_prompt_tokens,
                request.stop_token_ids,
                block_ids,
                request.num_computed_tokens,
            )
        )

    def _take(self, step: _Step, request: Request, num_tokens: int) -> None:
        step.num_scheduled_tokens[request.request_id] = num_tokens
        step.budget -= num_tokens
        request.num_computed_tokens += num_tokens

    def _find_prefix(self, request: Request) -> list[int]:
        if not (self._prefix_caching and request.may_use_cached_prefix):
            return []
        # At least one token must be left to compute: its logits give the next one.
        num_blocks = (request.num_tokens - 1) // self._block_size
        return self.pool.find_prefix(request.block_hashes(num_blocks, self._block_size))

    def _index_full_blocks(self, request: Request) -> None:
        if not self._prefix_caching or request.status is not RequestStatus.RUNNING:
            return
        num_full = request.num_computed_tokens // self._block_size
        hashes = request.block_hashes(num_full, self._block_size)
        for i in range(request.num_indexed_blocks, num_full):
            self.pool.index(request.block_ids[i], hashes[i])
        request.num_indexed_blocks = num_full

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _num_blocks_short(self, request: Request, num_tokens: int) -> int:
        return max(0, self._blocks_for(num_tokens) - len(request.block_ids))


class _Step:
    """A plan while it is being made."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.new: list[NewRequest] = []
        self.cached: list[CachedRequest] = []
        self.preempted_ids: set[str] = set()
        # nobody new is let in while those who run lack memory
        self.out_of_memory = False
        self.num_scheduled_tokens: dict[str, int] = {}
