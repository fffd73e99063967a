"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase: a request has known tokens and
computed tokens, and every step lets the second catch up with the first, within a
budget (continuous batching after Orca, OSDI 2022; chunked prefill after
Sarathi-Serve, OSDI 2024). A request one token behind is decoding; those go first.

Steps may be planned before earlier ones have results. A token that a step in flight
will sample has a placeholder: it counts as known, since the runner has it on the device
by the time it is needed. What only the token itself can tell comes late, and is fenced:
stop tokens cost a surplus token, blocks are reused only after the last step that listed
them, and a preempted request resumes only with all its output.
"""

from __future__ import annotations

from collections import deque

from runnerctl.config.engine_config import CacheSection, SchedulerSection
from runnerctl.engine.block_pool import BlockPool
from runnerctl.engine.outputs import FinishReason
from runnerctl.engine.request import Request, RequestStatus
from runnerctl.engine.scheduled_step import ScheduledStep
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
        # planned, without a result; oldest first
        self.in_flight: deque[ScheduledStep] = deque()
        self._step_id = 0
        self._finished_ids: set[str] = set()

    def add(self, request: Request) -> None:
        """Queue a request behind the others."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step, also while earlier ones have no result yet.

        Returns:
            An empty plan if there is nothing to do; None if there is nothing to do before
            the result of a step in flight is there.
        """
        step = ScheduledStep(self._step_id, self._limits.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.out_of_memory:
            self._admit_waiting(step)
        if self.in_flight and step.is_empty:
            return None
        step.finished_ids = frozenset(self._finished_ids)
        self.in_flight.append(step)
        self._finished_ids.clear()
        self._step_id += 1
        return step.plan()

    def update(self, result: StepResult) -> list[Request]:
        """Take in the tokens of the oldest step in flight; returns the requests that got one.

        A request that ended is finished here. Requests that ended while the step ran
        are skipped: it computed one token too many.

        Raises:
            RuntimeError: it is the result of another step, or lacks somebody's token.
        """
        step = self.in_flight[0]
        if result.step_id != step.step_id:
            raise RuntimeError(
                f"the runner gave the result of step {result.step_id} for step {step.step_id}"
            )
        self.in_flight.popleft()
        for block_ids in step.retired_block_ids:
            self.pool.release_retired(block_ids)
        updated = []
        for request, num_computed_tokens, samples in step.entries:
            if request.status is RequestStatus.FINISHED:
                continue
            if request.status is RequestStatus.RUNNING and self._prefix_caching:
                self._index_full_blocks(request, num_computed_tokens)
            if request.request_id in result.prompt_logprobs:
                request.add_prompt_logprobs(*result.prompt_logprobs[request.request_id])
            if samples:
                self._append_token(request, result)
                updated.append(request)
        return updated

    def abort_all(self) -> None:
        """End all requests and forget all steps in flight, after one of them raised.

        How far the runner got is not known, so what those steps told it to forget is told
        again. No step may be running any more.
        """
        for step in self.in_flight:
            self._finished_ids |= step.finished_ids
        self.in_flight.clear()
        for request in self.requests.values():
            request.block_ids = []
            request.status = RequestStatus.FINISHED
            request.finish_reason = "abort"
        self._finished_ids |= self.requests.keys()
        # Not one by one: whoever is here may have been interrupted between two lists.
        self.requests.clear()
        self.running.clear()
        self.waiting.clear()
        self.pool.release_all()

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, whatever its state, and free its blocks; once it is ended, do nothing.

        Blocks that a step in flight may still write are free once its result is there.
        """
        if request.status is RequestStatus.FINISHED:
            return
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]
            is_running = request.status is RequestStatus.RUNNING
            (self.running if is_running else self.waiting).remove(request)
            self._finished_ids.add(request.request_id)
        self._free_blocks(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def _schedule_running(self, step: ScheduledStep) -> None:
        # Arrival order is decodes first, and the budget has a token for each: only what it
        # leaves over is admitted, so all but the last of `running` have caught up.
        index = 0
        while index < len(self.running) and step.budget:  # only its end is ever preempted
            request = self.running[index]
            index += 1
            if request.awaits_last_token:
                continue
            num_tokens = min(request.num_uncomputed_tokens, step.budget)
            needed = self._blocks_for(request.num_computed_tokens + num_tokens)
            blocks: list[int] = []
            if needed > len(request.block_ids):
                num_blocks = needed - len(request.block_ids)
                if not self._make_room(num_blocks, request, step):
                    continue
                blocks = self.pool.allocate(num_blocks)
                request.block_ids += blocks
            step.cached.append(
                CachedRequest(request.request_id, tuple(blocks), request.num_computed_tokens)
            )
            step.take(request, num_tokens)

    def _make_room(self, num_blocks: int, request: Request, step: ScheduledStep) -> bool:
        """Preempt requests that came after `request`, latest first, for `num_blocks`.

        Blocks of preempted requests may have to wait for steps in flight, and a last
        token in flight frees its request's blocks: they are waited for rather than
        preempting more. While they are not there, `request` sits steps out. The oldest
        request can take the blocks of all others, so somebody always goes on.
        """
        pool = self.pool
        while pool.num_free_blocks + pool.num_leaving_blocks < num_blocks:
            step.out_of_memory = True
            last = self.running[-1]
            if last is request or self._somebody_ends_before(step):
                break
            self._preempt(last)
            step.preempted_ids.add(last.request_id)
        if pool.num_free_blocks < num_blocks:
            step.out_of_memory = True
            return False
        return True

    def _somebody_ends_before(self, step: ScheduledStep) -> bool:
        """True if an earlier step, which is in flight, brings the last token of a request."""
        return any(r.awaits_last_token and r.last_step_id < step.step_id for r in self.running)

    def _preempt(self, request: Request) -> None:
        self.running.pop()
        self._free_blocks(request)
        request.num_computed_tokens = 0
        request.num_indexed_blocks = 0
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        request.num_preemptions += 1

    def _free_blocks(self, request: Request) -> None:
        """Let go of a request's blocks, now or when the last step that listed them is done."""
        if self._is_in_flight(request):
            self.pool.retire(request.block_ids)
            last_step = self.in_flight[request.last_step_id - self.in_flight[0].step_id]
            last_step.retired_block_ids.append(request.block_ids)
        else:
            self.pool.release(request.block_ids)
        request.block_ids = []

    def _is_in_flight(self, request: Request) -> bool:
        return bool(self.in_flight) and request.last_step_id >= self.in_flight[0].step_id

    def _admit_waiting(self, step: ScheduledStep) -> None:
        while self.waiting and step.budget and len(self.running) < self._limits.max_num_seqs:
            request = self.waiting[0]
            if self._is_in_flight(request):
                return  # preempted, and its output is not there yet: it is part of what resumes
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
            step.take(request, num_tokens)

    def _announce(self, step: ScheduledStep, request: Request) -> None:
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

    def _find_prefix(self, request: Request) -> list[int]:
        if not (self._prefix_caching and request.may_use_cached_prefix):
            return []
        # At least one token must be left to compute: its logits give the next one.
        num_blocks = (request.num_tokens - 1) // self._block_size
        return self.pool.find_prefix(request.block_hashes(num_blocks, self._block_size))

    def _index_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make findable what steps with results have computed."""
        num_full = num_computed_tokens // self._block_size
        if num_full <= request.num_indexed_blocks:
            return
        hashes = request.block_hashes(num_full, self._block_size)
        for i in range(request.num_indexed_blocks, num_full):
            self.pool.index(request.block_ids[i], hashes[i])
        request.num_indexed_blocks = num_full

    def _append_token(self, request: Request, result: StepResult) -> None:
        """Put a token in the place kept for it; the request ends here if that was its last."""
        request_id = request.request_id
        token_id = result.sampled_token_ids.get(request_id)
        if token_id is None:
            raise RuntimeError(
                f"step {result.step_id} of the runner gave no token for request {request_id!r}, "
                "which had all its tokens computed"
            )
        request.num_output_placeholders -= 1
        request.append(token_id)
        if request_id in result.logprobs:
            request.logprobs.append(result.logprobs[request_id])
        if request.finish_reason is not None:
            self.finish(request, request.finish_reason)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
