"""The engine with several steps in flight, on a runner that executes them on a thread."""

import queue
import threading
from pathlib import Path

import pytest

from fake_runner import FakePagedRunner, reference
from runnerctl import LLM, EngineConfig, RunnerSpec, SamplingParams
from runnerctl.config.engine_config import CacheSection, ModelSection, SchedulerSection
from runnerctl.decision import Decision
from runnerctl.engine.engine import Engine
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel, WorkerContext
from runnerctl.testing.scripted import resolve_for
from runnerctl_runner_v1 import register_runners
from tiny_models import make_tiny_model, reference_generate

(V1,) = register_runners()
NUM_BLOCKS, BLOCK_SIZE = 30, 4
# Nothing here waits as long as this unless it would wait for ever.
HANG_S = 20


class ThreadRunner:
    """A `ModelRunner` whose steps run in order on a thread, each after its gate opens.

    Attributes:
        log: ("submit" | "run" | "done" | "taken", step_id) as they happen.
        gate: called on the thread before a step runs; may wait, or raise what the step
            is to fail with.
        interrupt_at: the step whose first `result` is interrupted.
    """

    def __init__(self, context):
        self.fake = FakePagedRunner(
            NUM_BLOCKS, context.config.cache.block_size, resumes_as_new=True
        )
        self.log = []
        self.plans = []
        self.gate = lambda step_id: None
        self.on_submit = lambda step_id: None
        self.on_take = lambda step_id: None
        self.interrupt_at = None
        self.num_in_flight = 0
        self._steps = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def load(self):
        return LoadedModel(vocab_size=50_000, max_model_len=100)

    def kv_cache_spec(self):
        return KVCacheSpec(layers=(), available_bytes=0)

    def initialize_kv_cache(self, num_blocks, max_model_len):
        pass

    def warm_up(self):
        pass

    def execute(self, plan):
        self.num_in_flight += 1
        self.log.append(("submit", plan.step_id))
        self.plans.append(plan)
        handle = Handle(self, plan)
        self._steps.put(handle)
        self.on_submit(plan.step_id)
        return handle

    def shutdown(self):
        self.log.append(("shutdown", self.num_in_flight))
        self._steps.put(None)
        self._thread.join(HANG_S)

    def _run(self):
        while (handle := self._steps.get()) is not None:
            step_id = handle.plan.step_id
            try:
                self.gate(step_id)
                self.log.append(("run", step_id))
                handle.outcome = self.fake.execute(handle.plan)
            except BaseException as error:
                handle.outcome = error
            self.log.append(("done", step_id))
            handle.done.set()


class Handle:
    def __init__(self, runner, plan):
        self.runner, self.plan = runner, plan
        self.done = threading.Event()
        self.outcome = None
        self.was_taken = False

    def result(self):
        step_id = self.plan.step_id
        if self.runner.interrupt_at == step_id:
            self.runner.interrupt_at = None
            raise KeyboardInterrupt
        assert self.done.wait(HANG_S), f"step {step_id} never ran"
        if self.was_taken:
            raise RuntimeError("taken twice")
        self.was_taken = True
        self.runner.num_in_flight -= 1
        self.runner.log.append(("taken", step_id))
        self.runner.on_take(step_id)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def start():
    """Starts engines; what they still hold at the end is a failure."""
    engines = []

    def start(depth=2, **limits):
        spec = RunnerSpec(
            "thread",
            f"{__name__}:ThreadRunner",
            resumes_as_new=True,
            concurrent_batches=depth,
        )
        config = EngineConfig(
            model=ModelSection(model="none"),
            scheduler=SchedulerSection(**limits),
            cache=CacheSection(block_size=BLOCK_SIZE, num_gpu_blocks_override=NUM_BLOCKS),
        )
        context = WorkerContext(config, Decision(spec.name), Path("none"), None)
        engines.append(Engine(spec, context, frozenset()))
        return engines[-1], engines[-1]._executor._runner

    yield start
    for engine in engines:
        engine.shutdown()


def add(engine, request_id, prompt, max_tokens, **params):
    request = engine.new_request(
        request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, **params)
    )
    engine.add_request(request)
    return request


def run(engine):
    for _ in range(200):
        if not engine.has_unfinished_requests:
            engine.scheduler.pool.check_idle()
            return
        engine.step()
    raise AssertionError("it never ends")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_next_steps_are_submitted_before_the_oldest_result_is_taken(start, depth):
    engine, runner = start(depth)
    gates = [threading.Event() for _ in range(50)]
    runner.gate = lambda step_id: gates[step_id].wait(HANG_S)
    # A step runs only once as many as may be in flight are: one at a time would wait for ever.
    runner.on_submit = lambda step_id: gates[max(0, step_id - depth + 1)].set()
    request = add(engine, "a", [1, 2, 3], 12)
    other = add(engine, "b", [4], 12)
    for step in range(12 - depth + 1):
        updated = engine.step()
        assert updated == [request, other]
        at = {event: i for i, event in enumerate(runner.log)}
        assert at["submit", step + depth - 1] < at["taken", step]
        assert ("submit", step + depth) not in at
    for gate in gates:
        gate.set()
    run(engine)
    assert request.output_token_ids == reference([1, 2, 3], 12)
    assert other.output_token_ids == reference([4], 12)
    assert len(runner.plans) == 12, "the end was known ahead"


def test_a_step_that_depends_on_a_result_waits_for_it(start):
    """Both of two batches wait for memory: no empty step is submitted instead."""
    engine, runner = start(2)
    requests = [add(engine, str(i), [i] * 30, 40) for i in range(3)]
    run(engine)
    assert engine.stats().num_preemptions > 0
    assert [r.output_token_ids for r in requests] == [reference([i] * 30, 40) for i in range(3)]
    assert all(p.num_scheduled_tokens or p.preempted_request_ids for p in runner.plans)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_token_leaves_nothing_in_flight(start, depth):
    expected = reference([1, 2, 3], 10)
    engine, runner = start(depth)
    request = add(engine, "a", [1, 2, 3], 10, stop_token_ids=(expected[3],))
    run(engine)
    assert request.output_token_ids == expected[:4]
    assert runner.num_in_flight == 0
    again = add(engine, "a", [5], 3)
    run(engine)
    assert again.output_token_ids == reference([5], 3)


def test_the_last_request_ended_from_outside_leaves_nothing_in_flight(start):
    engine, runner = start(3)
    first, last = (add(engine, name, [1, 2, 3], 10) for name in "ab")
    engine.step()
    engine.finish(first, "abort")
    assert runner.num_in_flight == 2
    engine.finish(last, "stop")
    assert runner.num_in_flight == 0
    engine.scheduler.pool.check_idle()
    assert engine.stats().num_blocks_used == 0


def failing(*step_ids):
    """A gate at which these steps fail."""

    def gate(step_id):
        if step_id in step_ids:
            raise RuntimeError(f"step {step_id} broke")

    return gate


def told(plans):
    return set().union(*(plan.finished_request_ids for plan in plans))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_that_fails_with_others_in_flight_ends_all_and_the_engine_goes_on(start, depth):
    stop = reference([1, 2, 3], 3)[2]
    engine, runner = start(depth)
    stopped = add(engine, "stopped", [1, 2, 3], 10, stop_token_ids=(stop,))
    others = [add(engine, name, [4, len(name)], 20) for name in ("x", "yy")]
    # the first plan that says that `stopped` is finished is lost on its way
    lost = depth + 2
    runner.gate = failing(*range(lost, lost + depth))
    for _ in range(lost):
        engine.step()
    with pytest.raises(RuntimeError, match=f"step {lost} broke"):
        engine.step()
    assert stopped.finish_reason == "stop"
    assert [r.finish_reason for r in others] == ["abort"] * 2
    assert [len(r.output_token_ids) for r in others] == [lost] * 2
    assert "stopped" in told(runner.plans[lost : lost + 1])
    # those behind it were waited for, and their outcome is nobody's
    assert runner.num_in_flight == 0
    assert len(runner.plans) == lost + depth
    engine.scheduler.pool.check_idle()
    assert not engine.has_unfinished_requests

    again = [add(engine, name, [6, len(name)], 5) for name in ("x", "stopped")]
    num_plans = len(runner.plans)
    run(engine)
    assert told(runner.plans[num_plans : num_plans + 1]) == {"stopped", "x", "yy"}
    assert [r.output_token_ids for r in again] == [reference([6, n], 5) for n in (1, 7)]


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_interrupt_while_waiting_leaves_nothing_running(start, depth, at):
    engine, runner = start(depth)
    request = add(engine, "a", [1, 2, 3], 20)
    for _ in range(at):
        engine.step()
    runner.interrupt_at = at
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    # also the interrupted step is waited for
    submitted = {step_id for event, step_id in runner.log if event == "submit"}
    assert {step_id for event, step_id in runner.log if event == "taken"} == submitted
    assert runner.num_in_flight == 0
    assert request.finish_reason == "abort"
    engine.scheduler.pool.check_idle()
    again = add(engine, "a", [5, 6], 5)
    run(engine)
    assert again.output_token_ids == reference([5, 6], 5)


def test_an_interrupt_while_nobody_is_left_to_wait_for_is_raised(start):
    engine, runner = start(2)
    request = add(engine, "a", [1, 2, 3], 20)
    engine.step()
    runner.interrupt_at = 1
    with pytest.raises(KeyboardInterrupt):
        engine.finish(request, "stop")
    assert runner.num_in_flight == 0
    engine.scheduler.pool.check_idle()


def test_the_error_of_a_step_that_nobody_waits_for_is_not_raised(start):
    engine, runner = start(2)
    runner.gate = failing(1)
    request = add(engine, "a", [1, 2, 3], 20)
    engine.step()
    engine.finish(request, "stop")
    assert request.finish_reason == "stop"
    engine.scheduler.pool.check_idle()
    again = add(engine, "a", [5, 6], 5)
    run(engine)
    assert again.output_token_ids == reference([5, 6], 5)


def test_the_runner_is_shut_down_with_nothing_in_flight(start):
    engine, runner = start(3)
    add(engine, "a", [1, 2, 3], 20)
    engine.step()
    assert runner.num_in_flight == 2
    engine.shutdown()
    assert ("shutdown", 0) in runner.log


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_overlapping_steps_are_counted_once(start, depth):
    stop = reference([1, 2, 3, 4, 5], 9)[5]
    engine, _ = start(depth, max_num_batched_tokens=4)
    add(engine, "a", [1, 2, 3, 4, 5], 20, stop_token_ids=(stop,))
    run(engine)
    stats = engine.stats()
    # two chunks, the second of one token; the surplus steps gave no token
    surplus = depth - 1
    assert (stats.num_prefill_tokens, stats.num_generated_tokens) == (5, 6)
    assert (stats.num_steps, stats.num_decode_tokens) == (7 + surplus, 5)
    assert stats.mean_batch_size == 1
    assert stats.peak_blocks_used == -(-(5 + 5 + surplus) // BLOCK_SIZE)
    assert stats.num_blocks_used == 0


def test_the_times_of_overlapping_steps_add_up_to_the_time_there_was(start, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("runnerctl.engine.engine.time.perf_counter", lambda: now[0])
    engine, runner = start(2)

    def wait(step_id):
        now[0] += 1.0 if step_id else 2.0

    runner.on_take = wait
    add(engine, "a", [1, 2, 3], 4)
    for _ in range(4):
        now[0] += 0.5  # the caller's own, during which a step is in flight but for the first time
        engine.step()
    stats = engine.stats()
    assert stats.prefill_time_s == 2.0
    assert stats.step_time_s == 2.0 + 3 * 1.5 == now[0] - 100.5


@pytest.mark.parametrize("depth", [2, 3])
def test_text_and_counts_through_llm_are_those_of_one_step_at_a_time(tmp_path_factory, depth):
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = [reference_generate(folder, prompt, 8)[0] for prompt in ([5, 6, 7], [9])]
    spec = RunnerSpec("several", V1.factory, resumes_as_new=True, concurrent_batches=depth)
    with LLM.from_resolved(resolve_for(spec, folder, {})) as llm:
        outputs = llm.generate([[5, 6, 7], [9]], params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert llm.stats().num_steps == 8
        stays = llm.stream([5, 6, 7], params)
        goes = llm.stream([9], params)
        got = list(next(stays).token_ids)
        next(goes)
        goes.close()
        got += [token for delta in stays for token in delta.token_ids]
        assert got == expected[0]
        engine = llm._engine
        engine.scheduler.pool.check_idle()
        # closed with a step in flight
        next(llm.stream([5], params))
