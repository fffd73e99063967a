"""The scheduler of pooling models: whole texts, in order of arrival, within the budget.

A text has no KV blocks, is never cut in chunks and never comes back: it is computed in one
step and ends with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from runnerctl.config import EngineConfig
from runnerctl.config.engine_config import SchedulerSection
from runnerctl.engine.block_pool import BlockPool
from runnerctl.engine.cache_size import CacheSize
from runnerctl.engine.outputs import FinishReason
from runnerctl.engine.pooling_params import PoolingParams
from runnerctl.engine.request import Request, RequestStatus
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.engine.scheduled_step import ScheduledStep
from runnerctl.runner.protocol import LoadedModel
from runnerctl.runner.step import NewRequest, StepPlan, StepResult

# Of a model without a context length.
_LENGTH_IF_UNBOUNDED = 131_072


class PoolingRequest(Request):
    """A text on its way through the engine.

    Attributes:
        pooling_params: what is to be made of it.
        token_type_ids: of a pair of texts, one per token; empty if all are 0.
        pooled: what came of it: an embedding, or a number per label.
    """

    def __init__(
        self,
        request_id: str,
        token_ids: Sequence[int],
        pooling_params: PoolingParams,
        token_type_ids: Sequence[int] = (),
    ) -> None:
        nothing_sampled = SamplingParams(max_tokens=1, temperature=0)
        super().__init__(
            request_id, token_ids, nothing_sampled, max_total_tokens=len(token_ids) + 1
        )
        self.pooling_params = pooling_params
        self.token_type_ids = tuple(token_type_ids)
        self.pooled: list[float] = []


class PoolingScheduler:
    """What the engine asks of a `Scheduler`, for requests that are one step long."""

    def __init__(self, limits: SchedulerSection) -> None:
        self.pool = BlockPool(0)
        self.waiting: deque[PoolingRequest] = deque()
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        # planned, without a result; oldest first
        self.in_flight: deque[ScheduledStep] = deque()
        self._limits = limits
        self._step_id = 0

    def add(self, request: Request) -> None:
        """Queue a `PoolingRequest` behind the others."""
        assert isinstance(request, PoolingRequest)
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> StepPlan | None:
        """As `Scheduler.schedule`. A text that is longer than the budget has a step to itself."""
        step = ScheduledStep(self._step_id, self._limits.max_num_batched_tokens)
        room = self._limits.max_num_seqs - sum(len(one.entries) for one in self.in_flight)
        while self.waiting and len(step.entries) < room:
            request = self.waiting[0]
            if request.status is RequestStatus.FINISHED:
                self.waiting.popleft()
                continue
            if step.entries and request.num_tokens > step.budget:
                break
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            step.new.append(_announced(request))
            step.take(request, request.num_tokens)
        if self.in_flight and step.is_empty:
            return None
        self.in_flight.append(step)
        self._step_id += 1
        return step.plan()

    def update(self, result: StepResult) -> list[Request]:
        """Take in the results of the oldest step in flight; returns the requests they are of.

        Raises:
            RuntimeError: it is the result of another step, or lacks somebody's.
        """
        step = self.in_flight[0]
        if result.step_id != step.step_id:
            raise RuntimeError(
                f"the runner gave the result of step {result.step_id} for step {step.step_id}"
            )
        self.in_flight.popleft()
        updated: list[Request] = []
        for request, _, _ in step.entries:
            if request.status is RequestStatus.FINISHED:
                continue
            assert isinstance(request, PoolingRequest)
            if request.request_id not in result.pooled:
                raise RuntimeError(
                    f"step {result.step_id} of the runner gave nothing for request "
                    f"{request.request_id!r}, which it had all tokens of"
                )
            request.pooled = result.pooled[request.request_id]
            self.finish(request, "stop")
            updated.append(request)
        return updated

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request. One that has ended stays as it is."""
        if request.status is RequestStatus.FINISHED:
            return
        # One that waits is dropped when its turn comes: taking it out here would make the end
        # of many at once slow.
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.requests.pop(request.request_id, None)

    def abort_all(self) -> None:
        """End all requests and forget all steps in flight, after one of them raised."""
        self.in_flight.clear()
        for request in self.requests.values():
            request.status = RequestStatus.FINISHED
            request.finish_reason = "abort"
        self.requests.clear()
        self.waiting.clear()


def size_without_cache(config: EngineConfig, model: LoadedModel) -> CacheSize:
    """What stands for the size of the cache where there is none: how long a text may be.

    A text cannot be cut in chunks. A budget that somebody set is kept all the same: it
    bounds the memory of a step.
    """
    assert model.pooling is not None
    longest = model.max_model_len or _LENGTH_IF_UNBOUNDED
    budget = config.scheduler.max_num_batched_tokens
    is_set = config.origin("max_num_batched_tokens").source != "default"
    if is_set and budget < longest:
        return CacheSize(0, budget, config.where("max_num_batched_tokens"))
    return CacheSize(0, longest, model.pooling.limited_by)


def _announced(request: PoolingRequest) -> NewRequest:
    return NewRequest(
        request.request_id,
        tuple(request.token_ids),
        request.sampling_params,
        request.num_prompt_tokens,
        request.stop_token_ids,
        (),
        0,
        request.pooling_params,
        request.token_type_ids,
    )
