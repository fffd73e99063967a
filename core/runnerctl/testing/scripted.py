"""A runner under plans written by hand: who computes how much in each step is up to the test.

`ScriptedRunner` keeps the books that a scheduler would keep - blocks, computed
tokens, who is new, known or resumed - and checks of every result what the step
contract promises, so that a test only has to say what happens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from runnerctl.config import EngineConfig
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.resolve import Resolved, resolve
from runnerctl.runner.protocol import ModelRunner, WorkerContext
from runnerctl.runner.spec import RunnerSpec
from runnerctl.runner.step import CachedRequest, NewRequest, StepHandle, StepPlan, StepResult
from runnerctl.testing.hosts import host_with
from runnerctl.testing.parity import assert_tokens, reference_tokens

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_MODEL_LEN = 64


def resolve_for(
    spec: RunnerSpec,
    folder: Path,
    settings: Mapping[str, Any],
    plugins: Iterable[object] = (),
) -> Resolved:
    """What `LLM` starts from, in float32, with `spec` as the runner.

    Args:
        spec: of the runner.
        folder: a checkpoint.
        settings: beyond those that this module sets.
        plugins: modules or objects; all there are.

    Raises:
        AssertionError: the host will not let the runner serve this model.
    """
    host = host_with(plugins, runners=[spec])
    provided = host.runners[spec.name]
    assert provided == spec, f"a plugin provides {spec.name!r} otherwise than the spec: {provided}"
    values = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, **settings}
    resolved = resolve(folder, host=host, environ={}, runner=spec.name, **values)
    said = "; ".join(problem.message for problem in resolved.decision.errors)
    assert resolved.decision.ok, f"the host refuses {spec.name} for {folder.name}: {said}"
    return resolved


def make_runner(resolved: Resolved) -> ModelRunner:
    """A runner that has not loaded anything yet."""
    config, decision = resolved.config, resolved.decision
    assert isinstance(config, EngineConfig)
    assert decision.runner is not None
    module, _, attribute = resolved.host.runners[decision.runner].factory.partition(":")
    factory = getattr(import_module(module), attribute)
    context = WorkerContext(config, decision, Path(config.model.model), resolved.host)
    runner: ModelRunner = factory(context)
    return runner


@dataclass(slots=True)
class ScriptedRequest:
    """What a scheduler would know of a request.

    Attributes:
        token_ids: those that came back; `num_pending` more are being computed.
        num_computed: tokens whose KV is in the blocks once all submitted steps are done.
        known: the runner has been told of it, and not that it is finished.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    known: bool = False
    preempted: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens there will be once all submitted steps are done."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """What a step would have to compute to get the next token."""
        return self.num_tokens - self.num_computed

    @property
    def output(self) -> list[int]:
        """The tokens that were sampled."""
        return self.token_ids[len(self.prompt) :]


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step without a result; `expected` are the requests that get a token from it."""

    plan: StepPlan
    handle: StepHandle
    expected: dict[str, ScriptedRequest]


class ScriptedRunner:
    """A started runner and its books.

    Args:
        spec: of the runner.
        folder: a checkpoint.
        settings: beyond those that this module sets.
        plugins: as for `resolve_for`.
        num_blocks: of the cache.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        folder: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        plugins: Iterable[object] = (),
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        values = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, **(settings or {})}
        self.folder = folder
        self.requests: dict[str, ScriptedRequest] = {}
        self.in_flight: list[_StepInFlight] = []
        self._spec = spec
        self._step_id = 0
        # Blocks are handed out in no order, and those just freed first. Block 0 is among
        # the first, where padding that is not masked would be written.
        self._free = list(range(1, num_blocks))
        random.Random(3).shuffle(self._free)
        self._free.append(0)
        self._held: list[tuple[int, list[int]]] = []
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self.runner = make_runner(resolve_for(spec, folder, values, plugins))
        try:
            self.runner.load()
            self.runner.initialize_kv_cache(num_blocks, MAX_MODEL_LEN)
            self.runner.warm_up()
        except BaseException:
            self.runner.shutdown()
            raise

    def close(self) -> None:
        """Shut the runner down."""
        self.runner.shutdown()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        prefix_of: str | None = None,
    ) -> ScriptedRequest:
        """Make a request known to the books; a step has to compute it.

        Args:
            request_id, prompt, params: of the request.
            prefix_of: a request whose full blocks hold the beginning of this prompt.
                They are shared, as the prefix cache would.
        """
        request = ScriptedRequest(request_id, list(prompt), params, list(prompt))
        if prefix_of is not None:
            other = self.requests[prefix_of]
            shared = min(other.num_computed, len(prompt) - 1) // BLOCK_SIZE
            assert other.token_ids[: shared * BLOCK_SIZE] == request.prompt[: shared * BLOCK_SIZE]
            request.block_ids = other.block_ids[:shared]
            request.num_computed = shared * BLOCK_SIZE
        self.requests[request_id] = request
        return request

    def finish(self, *request_ids: str) -> None:
        """End requests; the next plan says so. Their ids can be used again.

        So can their blocks, once the steps that are in flight now have results.
        """
        for request_id in request_ids:
            request = self.requests.pop(request_id)
            self._release(request)
            # as the engine does, also of a request that was aborted before its first step
            self._finished.add(request_id)

    def preempt(self, *request_ids: str) -> None:
        """Take requests' blocks away. The next plan says so; they come back after that one.

        They cannot come back before all steps that they were part of have results.
        """
        for request_id in request_ids:
            request = self.requests[request_id]
            self._release(request)
            request.block_ids, request.num_computed = [], 0
            request.preempted = True
            self._preempted.add(request_id)

    def plan(self, num_scheduled: Mapping[str, int] | None = None) -> StepPlan:
        """Write the next plan and book it as submitted.

        Args:
            num_scheduled: tokens to compute per request; by default all that are left, for
                every request that was not preempted just now.
        """
        if num_scheduled is None:
            num_scheduled = {
                name: request.num_uncomputed
                for name, request in self.requests.items()
                if name not in self._preempted
            }
        assert not self._preempted & set(num_scheduled), "preempted and resumed by one plan"
        entries = [self._entry(self.requests[r], count) for r, count in num_scheduled.items()]
        plan = StepPlan(
            step_id=self._step_id,
            new_requests=tuple(e for e in entries if isinstance(e, NewRequest)),
            cached_requests=tuple(e for e in entries if isinstance(e, CachedRequest)),
            num_scheduled_tokens=dict(num_scheduled),
            finished_request_ids=frozenset(self._finished),
            preempted_request_ids=frozenset(self._preempted),
        )
        self._step_id += 1
        self._finished.clear()
        self._preempted.clear()
        return plan

    def submit(self, num_scheduled: Mapping[str, int] | None = None) -> StepPlan:
        """Write the next plan and hand it to the runner, without waiting for its tokens."""
        plan = self.plan(num_scheduled)
        scheduled = {name: self.requests[name] for name in plan.num_scheduled_tokens}
        expected = {name: r for name, r in scheduled.items() if not r.num_uncomputed}
        for request in expected.values():
            request.num_pending += 1
        self.in_flight.append(_StepInFlight(plan, self.runner.execute(plan), expected))
        return plan

    def submit_ahead(self, num_scheduled: Mapping[str, int] | None = None) -> StepPlan:
        """`submit`, after taking a result if as many steps are in flight as the spec allows."""
        while len(self.in_flight) >= self._spec.concurrent_batches:
            self.take()
        return self.submit(num_scheduled)

    def take(self) -> StepResult:
        """Wait for the oldest step in flight, check its result, and take in its tokens."""
        step = self.in_flight.pop(0)
        plan, expected = step.plan, step.expected
        result = step.handle.result()
        assert result.step_id == plan.step_id, (
            f"the result of step {plan.step_id} says it is that of {result.step_id}"
        )
        said = dict(result.sampled_token_ids)
        assert said.keys() == expected.keys(), (
            f"step {plan.step_id} gave tokens to {sorted(said)}; the requests whose known "
            f"tokens are all computed are {sorted(expected)}"
        )
        asking = {name for name, r in expected.items() if r.params.logprobs is not None}
        assert set(result.logprobs) == asking, (
            f"step {plan.step_id} gave log-probabilities to {sorted(result.logprobs)}; "
            f"those that asked for them and got a token are {sorted(asking)}"
        )
        for request_id, token in said.items():
            assert isinstance(token, int), f"a token id is an int, not a {type(token).__name__}"
            expected[request_id].num_pending -= 1
            expected[request_id].token_ids.append(token)
        while self._held and self._held[0][0] <= plan.step_id:
            self._free += self._held.pop(0)[1]
        return result

    def step(self, num_scheduled: Mapping[str, int] | None = None) -> StepResult:
        """`submit` and `take`."""
        self.submit(num_scheduled)
        return self.take()

    def run(self) -> None:
        """Step until every request has its `max_tokens`."""
        while any(len(r.output) < r.params.max_tokens for r in self.requests.values()):
            self.step(
                {
                    name: request.num_uncomputed
                    for name, request in self.requests.items()
                    if len(request.output) < request.params.max_tokens
                    and name not in self._preempted
                }
            )

    def check(self, *request_ids: str) -> None:
        """Compare what requests got so far with the reference; by default those that live."""
        for request_id in request_ids or self.requests:
            request = self.requests[request_id]
            expected = reference_tokens(self.folder, request.prompt, request.params)
            assert_tokens(request.output, expected, f"request {request_id!r}")

    def _entry(self, request: ScriptedRequest, count: int) -> NewRequest | CachedRequest:
        """What the plan says of a request, which computes `count` more tokens."""
        assert 1 <= count <= request.num_uncomputed, "the script asks for tokens there are not"
        computed = request.num_computed
        needed = -(-(computed + count) // BLOCK_SIZE) - len(request.block_ids)
        added = [self._free.pop() for _ in range(max(0, needed))]
        request.block_ids += added
        request.num_computed += count
        resumed, request.preempted = request.preempted, False
        assert not (resumed and request.num_pending), "resumed with a token on its way"
        if request.known and not (resumed and self._spec.resumes_as_new):
            blocks = request.block_ids if resumed else added
            return CachedRequest(request.request_id, tuple(blocks), computed, resumed)
        request.known = True
        return new_request(request, computed)

    def _release(self, request: ScriptedRequest) -> None:
        """Give back the blocks that no other request has, after the steps in flight."""
        others = {b for r in self.requests.values() if r is not request for b in r.block_ids}
        released = [block for block in request.block_ids if block not in others]
        if self.in_flight:
            self._held.append((self.in_flight[-1].plan.step_id, released))
        else:
            self._free += released


def new_request(request: ScriptedRequest, num_computed_tokens: int) -> NewRequest:
    """The one place where the kit builds the data of a new request."""
    return NewRequest(
        request_id=request.request_id,
        prefill_token_ids=tuple(request.token_ids),
        sampling_params=request.params,
        num_prompt_tokens=len(request.prompt),
        stop_token_ids=frozenset(),
        block_ids=tuple(request.block_ids),
        num_computed_tokens=num_computed_tokens,
    )
