"""A step as the scheduler sees it, from its planning until its result."""

from __future__ import annotations

from runnerctl.engine.request import Request
from runnerctl.runner.step import CachedRequest, NewRequest, StepPlan


class ScheduledStep:
    """What is to be computed, and what has to be remembered until it is.

    Attributes:
        budget: tokens that may still be added.
        out_of_memory: somebody who runs lacks blocks; nobody new is let in.
        entries: each request of the step, its computed tokens after it, and whether it
            samples a token. Requests, not ids: an id may be another's when the result comes.
        num_prefill_tokens: see `EngineStats`.
        retired_block_ids: blocks of requests that ended or were preempted while this was
            the last step that listed them; free once its result is there.
    """

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.out_of_memory = False
        self.new: list[NewRequest] = []
        self.cached: list[CachedRequest] = []
        self.preempted_ids: set[str] = set()
        self.finished_ids: frozenset[str] = frozenset()
        self.num_scheduled_tokens: dict[str, int] = {}
        self.entries: list[tuple[Request, int, bool]] = []
        self.num_prefill_tokens = 0
        self.retired_block_ids: list[list[int]] = []

    @property
    def is_empty(self) -> bool:
        """True if the runner would have nothing to do, except to forget finished requests."""
        return not self.num_scheduled_tokens and not self.preempted_ids

    def take(self, request: Request, num_tokens: int) -> None:
        """Let a request compute `num_tokens` more; it gets a token if none is left then."""
        computed = request.num_computed_tokens + num_tokens
        samples = computed == len(request.token_ids) + request.num_output_placeholders
        if samples:
            request.num_output_placeholders += 1
        if not (samples and num_tokens == 1 and computed > request.num_prompt_tokens):
            self.num_prefill_tokens += num_tokens
        request.num_computed_tokens = computed
        request.last_step_id = self.step_id
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.entries.append((request, computed, samples))
        self.budget -= num_tokens

    def plan(self) -> StepPlan:
        """What the runner is told."""
        return StepPlan(
            step_id=self.step_id,
            new_requests=tuple(self.new),
            cached_requests=tuple(self.cached),
            num_scheduled_tokens=self.num_scheduled_tokens,
            finished_request_ids=self.finished_ids,
            preempted_request_ids=frozenset(self.preempted_ids),
        )
