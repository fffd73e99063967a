"""The data of one step, between scheduler and runner. No torch here.

One shape for every runner. The only difference between runners is how a
preempted request comes back: as a new request or as a cached one with `resumed`
set (`RunnerSpec.resumes_as_new`).

A runner with `concurrent_batches` above 1 is given plans before it has returned the
results of earlier ones. It may rely on this:

- Plans are in order, and what each says holds after the one before it: the effect of a
  plan on the runner's state is the same whether or not earlier results were taken.
- A step may compute the position of a token that an earlier step samples and whose
  result is not taken yet. The engine does not know that token; the runner does, as it
  executes steps in order.
- A plan may finish or preempt a request while an earlier step of it is still running.
  That step still owes a token for it, which the engine keeps or discards.
- A block is in a plan for another request only when every step that listed it for the
  former holder has a result. A prefix is shared only once results say it is computed.
- A preempted request comes back only when all steps that it was part of have results; all
  its tokens are known to the engine then.
- An id may be used again as soon as the old request has ended, in the same plan that
  finishes the old one at the earliest: forget finished requests first, then add new ones.
- A plan may be empty but for finished and preempted ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from runnerctl.engine.pooling_params import PoolingParams
from runnerctl.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of one token, and of the likeliest ones in its place.

    Attributes:
        token_id, logprob: the token that came, and its log-probability.
        rank: 1 for the most likely token; tokens of equal probability share a rank.
        top_token_ids, top_logprobs: the most likely tokens, best first, as many as
            the request asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the runner does not know yet.

    Attributes:
        request_id: unique among live requests; see `StepPlan.finished_request_ids`.
        prefill_token_ids: every token known so far: the prompt, and for a request
            that resumes as new also what it had generated.
        sampling_params: with `seed` always set, and bad words as token ids.
        num_prompt_tokens: how many of `prefill_token_ids` are the prompt.
        stop_token_ids: all tokens that end it; banned before `min_tokens`.
        block_ids: its KV blocks, in order of position.
        num_computed_tokens: tokens whose KV is already in those blocks.
        pooling_params: of a request to a pooling model, else None. Such a request is computed
            whole in one step, has no blocks, and ends with that step.
        token_type_ids: of a pooling request for a pair of texts, one per token; empty if all
            are 0.
    """

    request_id: str
    prefill_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    pooling_params: PoolingParams | None = None
    token_type_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """A request the runner knows, scheduled again.

    Attributes:
        request_id: as before.
        new_block_ids: blocks to append to its block table; if `resumed`, all of them.
        num_computed_tokens: tokens whose KV is in its blocks before this step, once the
            steps in flight are done.
        resumed: it was preempted: its old blocks are gone, `new_block_ids` replace them.
    """

    request_id: str
    new_block_ids: tuple[int, ...]
    num_computed_tokens: int
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to compute in one step.

    Attributes:
        step_id: counts up by one.
        new_requests, cached_requests: the state changes the runner needs.
        num_scheduled_tokens: tokens to compute per request id; each at least 1. Every
            key is in `new_requests` or `cached_requests`, and the other way round.
        finished_request_ids: drop all state of these first. After a failed step they may be
            named again; an id the runner does not know is nothing to it.
        preempted_request_ids: their blocks are gone once the steps in flight are done; they
            may come back in a later plan, never in this one.
    """

    step_id: int
    new_requests: tuple[NewRequest, ...] = ()
    cached_requests: tuple[CachedRequest, ...] = ()
    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    finished_request_ids: frozenset[str] = frozenset()
    preempted_request_ids: frozenset[str] = frozenset()

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens computed in this step over all requests."""
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced.

    Attributes:
        step_id: of the plan.
        sampled_token_ids: the new token of each request that got one. A request whose
            prefill is not complete after this step is absent. One that was finished or
            preempted by a later plan is not: its token is looked at, or not, by the engine.
        logprobs: of those tokens, for the requests that asked.
        prompt_logprobs: of the prompt tokens whose predecessor was computed in this
            step, for the requests that asked: (position of the first, one per token).
        pooled: of the pooling requests of this step: the embedding, or a number per label.
    """

    step_id: int
    sampled_token_ids: Mapping[str, int]
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    pooled: Mapping[str, list[float]] = field(default_factory=dict)


class StepHandle(Protocol):
    """A step that was submitted. Steps finish in the order of submission."""

    def result(self) -> StepResult:
        """Wait until the tokens are on the host and return them; call it once.

        A call that was interrupted while it waited (`KeyboardInterrupt`) does not count: the
        engine calls again, to be sure that the step has ended.

        Raises:
            RuntimeError: called again after it returned or raised what the step raised.
            Exception: whatever the step raised. Steps submitted after it have handles too,
                and theirs return or raise as well.
        """
        ...


class FinishedStep:
    """The handle of a synchronous runner: the step is done when it is returned."""

    def __init__(self, outcome: StepResult | BaseException) -> None:
        self._outcome: StepResult | BaseException | None = outcome

    def result(self) -> StepResult:
        """See `StepHandle.result`."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            raise RuntimeError("StepHandle.result() was called twice")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
