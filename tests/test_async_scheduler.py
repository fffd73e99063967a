"""The scheduler with several steps in flight, against a runner that is as late as it may be."""

from collections import deque
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runner import LateFakeRunner, reference
from runnerctl.engine.request import RequestStatus
from runnerctl.runner.step import StepResult
from scheduler_harness import SchedulerHarness


class Harness(SchedulerHarness):
    """Does what the engine does: `depth` steps in flight, then the oldest result."""

    def __init__(self, *, depth=2, choices=(0,), resumes_as_new=True, **settings):
        self.depth = depth
        self.choices = choices
        self.in_flight = deque()
        super().__init__(resumes_as_new=resumes_as_new, **settings)

    def make_runner(self, num_blocks, block_size, *, resumes_as_new, max_num_seqs):
        return LateFakeRunner(
            num_blocks,
            block_size,
            resumes_as_new=resumes_as_new,
            max_num_seqs=max_num_seqs,
            how_many=cycle(self.choices).__next__,
        )

    def submit(self):
        """The plan, or None if the next step depends on a result."""
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.in_flight, "nothing to wait for: the engine would hang"
            return None
        assert plan.num_scheduled_tokens or plan.preempted_request_ids or not self.in_flight
        self.planned(plan)
        self.in_flight.append(plan)
        self.runner.submit(plan)
        return plan

    def take(self):
        """The requests that got a token from the oldest step."""
        self.in_flight.popleft()
        return self.scheduler.update(self.runner.result())

    def step(self):
        while len(self.in_flight) < self.depth and self.submit() is not None:
            pass
        return self.take()

    def run(self):
        for _ in range(3000):
            if not self.scheduler.requests:
                break
            self.step()
        else:
            raise AssertionError("it never ends")
        self.drain()

    def drain(self):
        while self.in_flight:
            assert self.take() == []
        self.pool.check_idle()
        assert self.pool.num_leaving_blocks == 0


depths = pytest.mark.parametrize("depth", [1, 2, 3])


@depths
def test_a_step_is_planned_before_the_token_it_computes_is_known(depth):
    harness = Harness(depth=depth)
    request = harness.add([1, 2, 3], 10)
    for i in range(depth):
        plan = harness.submit()
        assert plan.num_scheduled_tokens == {"r0": 1 if i else 3}
        assert [c.num_computed_tokens for c in plan.cached_requests] == [2 + i] * (i > 0)
    assert request.output_token_ids == []
    harness.run()
    assert request.output_token_ids == reference([1, 2, 3], 10)


@depths
def test_the_end_that_is_known_ahead_costs_no_surplus_step(depth):
    harness = Harness(depth=depth)
    requests = [harness.add([1, 2, 3], 10), harness.add([4], 7), harness.add([5] * 9, 1)]
    harness.run()
    assert [r.output_token_ids for r in requests] == [
        reference([1, 2, 3], 10),
        reference([4], 7),
        reference([5] * 9, 1),
    ]
    assert [len(plan.num_scheduled_tokens) for plan in harness.plans] == [3] + [2] * 6 + [1] * 3


@depths
def test_tokens_after_a_stop_token_are_discarded(depth):
    expected = reference([1, 2, 3], 10)
    harness = Harness(depth=depth)
    request = harness.add([1, 2, 3], 10, stop_token_ids=(expected[4],))
    harness.run()
    assert request.output_token_ids == expected[:5]
    assert (request.finish_reason, request.stop_reason) == ("stop", expected[4])
    assert len(harness.plans) == 5 + depth - 1


def test_a_surplus_token_is_not_given_to_the_next_request_of_that_id():
    expected = reference([1, 2, 3], 10)
    harness = Harness(depth=3)
    harness.add([1, 2, 3], 10, "same", stop_token_ids=(expected[0],))
    assert len(harness.step()) == 1
    again = harness.add([7, 8], 4, "same")
    plan = harness.submit()
    assert plan.finished_request_ids == {"same"} == plan.num_scheduled_tokens.keys()
    harness.run()
    assert again.output_token_ids == reference([7, 8], 4)


def test_a_request_that_ends_while_the_runner_is_behind_is_named_in_the_next_plan():
    harness = Harness()
    request = harness.add([1, 2, 3], 10)
    harness.step()
    harness.scheduler.finish(request, "abort")
    # nothing to compute: no plan, but what there is to tell is kept
    assert harness.submit() is None
    other = harness.add([5], 2)
    assert harness.submit().finished_request_ids == {request.request_id}
    harness.run()
    assert other.output_token_ids == reference([5], 2)
    # with nothing in flight there is always a plan: all are told in the end
    assert harness.submit().finished_request_ids == {other.request_id}


def test_blocks_are_reused_only_when_the_last_step_that_listed_them_has_a_result():
    harness = Harness(num_blocks=4, depth=3)
    first = harness.add([1] * 8, 8)
    for _ in range(3):
        harness.submit()
    harness.scheduler.finish(first, "abort")
    harness.add([2] * 5, 4)
    assert (harness.pool.num_free_blocks, harness.pool.num_leaving_blocks) == (1, 3)
    harness.take()
    assert harness.submit() is None
    harness.take()
    assert harness.submit() is None
    harness.take()
    assert (harness.pool.num_free_blocks, harness.pool.num_leaving_blocks) == (4, 0)
    assert harness.submit().new_requests
    harness.run()
    assert harness.arrivals[1].output_token_ids == reference([2] * 5, 4)


def test_a_prefix_is_found_only_once_a_result_says_that_it_is_computed():
    harness = Harness()
    prompt = list(range(9))
    harness.add(prompt, 5)
    harness.submit()
    early = harness.add(prompt, 5)
    harness.submit()
    harness.take()
    late = harness.add(prompt, 5)
    harness.run()
    assert (early.num_cached_tokens, late.num_cached_tokens) == (0, 8)


def test_a_block_is_findable_only_when_its_tokens_are_known():
    harness = Harness(depth=3)
    request = harness.add([1, 2, 3], 10)
    for _ in range(3):
        harness.submit()
    # planned as far as the fifth position, but the fourth token is not known yet
    assert request.num_computed_tokens == 5
    harness.take()
    assert request.num_indexed_blocks == 0
    harness.take()
    assert request.num_indexed_blocks == 1
    harness.run()
    again = harness.add([*request.token_ids, 5], 2)
    harness.run()
    assert again.num_cached_tokens == 12


def preempted_with_a_token_in_flight(**params):
    """The younger of two has just lost its blocks, and its last step has no result yet."""
    harness = Harness(num_blocks=4)
    older = harness.add([1] * 4, 9)
    younger = harness.add([2] * 4, 9, **params)
    for _ in range(30):
        harness.submit()
        if younger.status is RequestStatus.PREEMPTED:
            break
        if len(harness.in_flight) == 2:
            harness.take()
    assert younger.num_output_placeholders
    return harness, older, younger


@pytest.mark.parametrize("surplus", [False, True])
def test_a_preempted_request_keeps_the_token_that_was_in_flight(surplus):
    harness, older, younger = preempted_with_a_token_in_flight()
    if surplus:  # memory is there again, but the token is not
        harness.scheduler.finish(older, "abort")
    while younger.num_output_placeholders:
        known = younger.num_tokens
        plan = harness.submit() if len(harness.in_flight) < 2 else None
        assert plan is None or younger.request_id not in plan.num_scheduled_tokens
        harness.take()
        assert younger.num_tokens <= known + 1
    (resumed,) = [
        new
        for plan in _until_resumed(harness, younger)
        for new in plan.new_requests
        if new.request_id == younger.request_id
    ]
    assert list(resumed.prefill_token_ids) == [2] * 4 + younger.output_token_ids[: known - 3]
    harness.run()
    assert younger.output_token_ids == reference([2] * 4, 9)


def _until_resumed(harness, request):
    num_plans = len(harness.plans)
    for _ in range(30):
        if request.status is RequestStatus.PREEMPTED:
            harness.step()
    return harness.plans[num_plans:]


def test_a_token_in_flight_may_end_a_preempted_request():
    expected = reference([2] * 4, 9)
    probe, _, younger = preempted_with_a_token_in_flight()
    last = len(younger.output_token_ids) + younger.num_output_placeholders
    probe.run()
    harness, older, younger = preempted_with_a_token_in_flight(stop_token_ids=(expected[last - 1],))
    harness.run()
    assert younger.output_token_ids == expected[:last]
    assert (younger.finish_reason, younger.num_preemptions) == ("stop", 1)
    assert older.output_token_ids == reference([1] * 4, 9)
    assert sum(new.request_id == "r1" for plan in harness.plans for new in plan.new_requests) == 1


@pytest.mark.parametrize("depth", [2, 3])
def test_no_more_are_preempted_than_have_the_blocks_that_are_needed(depth):
    # three decode in step; the first to need a block gets that of the last, once it is free
    harness = Harness(num_blocks=6, depth=depth, prefix_caching=False)
    requests = [harness.add([i] * 6, 5) for i in range(3)]
    while not harness.scheduler.num_preemptions:
        harness.step()
    for _ in range(depth):
        harness.step()
        assert harness.scheduler.num_preemptions == 1
    assert [r.num_preemptions for r in requests] == [0, 0, 1]
    harness.run()
    assert [r.output_token_ids for r in requests] == [reference([i] * 6, 5) for i in range(3)]


def test_who_ends_with_a_token_in_flight_is_waited_for_rather_than_others_preempted():
    harness = Harness(num_blocks=3, block_size=4)
    older = harness.add([1] * 3, 5)
    ends = harness.add([2] * 5, 2)
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    assert older.output_token_ids == reference([1] * 3, 5)
    assert ends.output_token_ids == reference([2] * 5, 2)


def test_a_preempted_request_waits_for_its_output_even_if_memory_is_there():
    harness = Harness(num_blocks=4, depth=3, prefix_caching=False)
    older, idle, younger, gone = (harness.add([i] * n, 9) for i, n in enumerate((3, 4, 2, 2)))
    harness.submit()
    harness.scheduler.finish(gone, "abort")
    # `idle` waits for that block, but the older one is the first to take it
    assert harness.submit().num_scheduled_tokens == {"r0": 1, "r2": 1}
    harness.take()
    plan = harness.submit()
    assert (plan.num_scheduled_tokens, plan.preempted_request_ids) == ({"r0": 1}, {"r2"})
    harness.scheduler.finish(idle, "abort")
    assert (harness.pool.num_free_blocks, younger.num_output_placeholders) == (1, 1)
    assert harness.submit().num_scheduled_tokens == {"r0": 1}
    harness.take()
    assert [list(new.prefill_token_ids) for new in harness.submit().new_requests] == [
        [2, 2, *reference([2, 2], 2)]
    ]
    harness.run()
    assert younger.output_token_ids == reference([2, 2], 9)
    assert older.output_token_ids == reference([0] * 3, 9)


def test_nobody_new_takes_the_blocks_that_a_running_request_waits_for():
    harness = Harness(num_blocks=6, budget=12)
    gone = harness.add([1, 2], 9)
    long = harness.add(list(range(22)), 2)
    assert harness.submit().num_scheduled_tokens == {"r0": 2, "r1": 10}
    harness.scheduler.finish(gone, "abort")
    late = harness.add([3, 4], 2)
    # it lacks one block of three, which that step still holds
    assert harness.submit() is None
    harness.take()
    assert harness.submit().num_scheduled_tokens == {"r1": 12}
    harness.run()
    assert long.output_token_ids == reference(range(22), 2)
    assert late.output_token_ids == reference([3, 4], 2)


def test_results_of_another_step_or_without_a_token_are_refused():
    harness = Harness()
    harness.add([1, 2], 5)
    harness.submit()
    with pytest.raises(RuntimeError, match="result of step 1 for step 0"):
        harness.scheduler.update(StepResult(1, {"r0": 5}))
    with pytest.raises(RuntimeError, match="no token for request 'r0'"):
        harness.scheduler.update(StepResult(0, {}))


@depths
def test_after_a_failure_all_is_free_and_what_was_told_in_flight_is_told_again(depth):
    harness = Harness(depth=depth, num_blocks=8, max_num_seqs=2)
    done, *others = (harness.add([i] * 5, 9) for i in range(4))
    harness.step()
    harness.scheduler.finish(done, "abort")
    while len(harness.in_flight) < depth:
        harness.submit()
    assert done.request_id in set().union(*(p.finished_request_ids for p in harness.in_flight))
    harness.scheduler.abort_all()
    assert [r.finish_reason for r in others] == ["abort"] * 3
    harness.pool.check_idle()
    plan = harness.scheduler.schedule()
    assert plan.finished_request_ids == {"r0", "r1", "r2", "r3"}
    assert not plan.num_scheduled_tokens


workload = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),  # few tokens: many shared prefixes
        st.integers(1, 16),
        st.integers(0, 12),  # the round in which it arrives
        st.sampled_from(["length", "stop token", "stop string", "abort"]),
        st.integers(0, 15),  # the token that ends it, or rounds until it is aborted
    ),
    min_size=1,
    max_size=8,
)


class Client:
    """Adds requests and ends them; a few ids are used over and over."""

    def __init__(self, harness, workload, num_ids):
        self.harness = harness
        self.pending = deque(sorted(workload, key=lambda item: item[2]))
        self.num_ids = num_ids
        self.live = {}
        self.expected = []

    def add_arrivals(self, round_):
        ids = (f"r{i}" for i in range(self.num_ids))
        for request_id in (i for i in ids if i not in self.harness.scheduler.requests):
            if not self.pending or self.pending[0][2] > round_:
                return
            prompt, max_tokens, _, how, when = self.pending.popleft()
            expected = reference(prompt, max_tokens)
            stop = None
            if how.startswith("stop") and when < max_tokens:
                stop = expected[when]
                expected = expected[: expected.index(stop) + 1]
            params = {"stop_token_ids": (stop,)} if stop and how == "stop token" else {}
            request = self.harness.add(prompt, max_tokens, request_id, **params)
            abort_at = round_ + when if how == "abort" else None
            self.live[request] = (stop if how == "stop string" else None, abort_at)
            self.expected.append((request, expected))

    def abort_some(self, round_):
        for request, (_, abort_at) in self.live.items():
            if abort_at is not None and abort_at <= round_:
                self.harness.scheduler.finish(request, "abort")

    def see(self, updated):
        assert len(set(updated)) == len(updated)
        for request in updated:
            if request.token_ids[-1] == self.live[request][0]:
                self.harness.scheduler.finish(request, "stop")

    def check(self):
        for request, expected in self.expected:
            said = request.output_token_ids
            aborted = request.finish_reason == "abort"
            assert said == (expected[: len(said)] if aborted else expected)


@settings(max_examples=300, deadline=None)
@given(
    workload=workload,
    depth=st.integers(1, 3),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 10),
    limits=st.tuples(st.integers(1, 40), st.integers(1, 6)),
    prefix_caching=st.booleans(),
    resumes_as_new=st.booleans(),
    choices=st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_any_workload_gives_every_request_its_own_tokens_and_leaks_no_block(
    workload, depth, block_size, spare_blocks, limits, prefix_caching, resumes_as_new, choices
):
    harness = Harness(
        depth=depth,
        num_blocks=-(-36 // block_size) + spare_blocks,
        block_size=block_size,
        budget=limits[0],
        max_num_seqs=limits[1],
        prefix_caching=prefix_caching,
        resumes_as_new=resumes_as_new,
        choices=choices,
    )
    client = Client(harness, workload, num_ids=4)
    choose = cycle(choices)
    round_ = 0
    while client.pending or harness.scheduler.requests:
        client.add_arrivals(round_)
        client.abort_some(round_)
        # as the engine does, or with fewer in flight
        while harness.scheduler.requests and len(harness.in_flight) < depth:
            if (harness.in_flight and next(choose) == 3) or harness.submit() is None:
                break
            client.abort_some(round_ + next(choose) // 3)
        if harness.in_flight:
            client.see(harness.take())
        round_ += 1
        assert round_ < 3000
    harness.drain()
    client.check()
    harness.submit()
    harness.take()
    assert not harness.runner.tokens, "the runner was not told of all that ended"
