"""The scheduler against a runner that reads back what it wrote."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runner import FakePagedRunner, reference
from runnerctl.engine.request import RequestStatus
from scheduler_harness import SchedulerHarness


class Harness(SchedulerHarness):
    """One step at a time."""

    def make_runner(self, num_blocks, block_size, *, resumes_as_new, max_num_seqs):
        self.told = set()
        return FakePagedRunner(num_blocks, block_size, resumes_as_new=resumes_as_new)

    def step(self):
        plan = self.scheduler.schedule()
        self.planned(plan)
        # a runner told twice would drop a later request of the same id
        assert not plan.finished_request_ids & self.told
        self.told |= plan.finished_request_ids
        running = self.scheduler.running
        assert len(running) <= self.budget
        # a prefill in chunks is the last that was let in
        assert not any(r.num_uncomputed_tokens > 1 for r in running[:-1])
        self.scheduler.update(self.runner.execute(plan))
        return plan

    def run(self):
        while self.scheduler.requests:
            assert self.step().num_scheduled_tokens, "a step without work: the engine would hang"
        self.pool.check_idle()


def test_a_request_gets_exactly_the_tokens_it_would_get_alone():
    harness = Harness()
    request = harness.add([1, 2, 3], 10)
    harness.run()
    assert request.output_token_ids == reference([1, 2, 3], 10)
    assert request.finish_reason == "length"


def test_sixteen_unequal_requests_take_hardly_more_steps_than_the_longest():
    harness = Harness(budget=512)
    lengths = range(10, 90, 5)
    requests = [harness.add([n] * (n % 7 + 1), n) for n in lengths]
    harness.run()
    assert [len(r.output_token_ids) for r in requests] == list(lengths)
    assert len(harness.plans) < 1.2 * max(lengths)


def test_a_long_prompt_is_cut_in_chunks_and_decodes_go_on_beside_it():
    harness = Harness(budget=10)
    short = harness.add([1], 20)
    harness.step()
    long = harness.add(list(range(35)), 3)
    sizes = []
    while long.num_uncomputed_tokens > 1 or not long.output_token_ids:
        plan = harness.step()
        assert plan.num_scheduled_tokens[short.request_id] == 1
        sizes.append(plan.num_scheduled_tokens[long.request_id])
    assert sizes == [9, 9, 9, 8]
    harness.run()
    assert long.output_token_ids == reference(range(35), 3)


def test_a_budget_below_the_number_of_requests_starves_nobody():
    harness = Harness(budget=3, max_num_seqs=8)
    requests = [harness.add([i], 6) for i in range(8)]
    for _ in range(8 * 6 // 3 + 2):
        if harness.scheduler.requests:
            harness.step()
    assert all(r.status is RequestStatus.FINISHED for r in requests)
    assert [r.output_token_ids for r in requests] == [reference([i], 6) for i in range(8)]


@pytest.mark.parametrize("length", [8, 9, 11, 12, 13])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(length):
    harness = Harness(block_size=4)
    prompt = list(range(length))
    harness.add(prompt, 2)
    harness.run()
    again = harness.add(prompt, 2)
    first = harness.step().num_scheduled_tokens[again.request_id]
    harness.run()
    assert again.num_cached_tokens == (length - 1) // 4 * 4
    assert first == length - again.num_cached_tokens >= 1
    assert again.output_token_ids == reference(prompt, 2)


def test_generated_tokens_are_part_of_the_prefix_that_a_later_request_finds():
    harness = Harness(block_size=4)
    first = harness.add([1, 2, 3], 10)
    harness.run()
    again = harness.add([*first.token_ids, 5], 2)
    harness.run()
    # the last generated token was never computed: 12 of 13 are
    assert again.num_cached_tokens == 12


def test_without_prefix_caching_nothing_is_found():
    harness = Harness(prefix_caching=False)
    harness.add([1] * 12, 2)
    harness.run()
    again = harness.add([1] * 12, 2)
    harness.run()
    assert again.num_cached_tokens == 0


def test_requests_with_a_common_prefix_share_its_blocks():
    harness = Harness(num_blocks=12, block_size=4)
    shared = list(range(24))
    harness.add(shared, 1)
    harness.run()
    # 6 blocks for each alone would not fit; 5 shared ones and one each do
    pair = [harness.add([*shared, 1], 3), harness.add([*shared, 2], 3)]
    harness.step()
    assert all(r.status is RequestStatus.RUNNING for r in pair)
    assert pair[0].block_ids[:6] == pair[1].block_ids[:6]
    harness.run()
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize("resumes_as_new", [False, True])
def test_under_memory_pressure_the_latest_is_preempted_and_loses_nothing(resumes_as_new):
    harness = Harness(num_blocks=8, block_size=4, resumes_as_new=resumes_as_new)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11]]
    requests = [harness.add(prompt, 20) for prompt in prompts]
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert [r.output_token_ids for r in requests] == [reference(p, 20) for p in prompts]
    first_preempted = next(
        p.preempted_request_ids for p in harness.plans if p.preempted_request_ids
    )
    assert first_preempted == {requests[2].request_id}


def test_who_gets_its_last_token_in_this_step_is_not_waited_for():
    harness = Harness(num_blocks=3, block_size=4)
    ends, grows, latest = (harness.add([i] * n, n) for i, n in enumerate((2, 4, 3)))
    harness.step()
    plan = harness.step()
    assert plan.num_scheduled_tokens.keys() == {ends.request_id, grows.request_id}
    assert plan.preempted_request_ids == {latest.request_id}
    harness.run()


def test_a_resumed_request_counts_its_budget_after_the_prefix_hit():
    harness = Harness(num_blocks=6, block_size=4, budget=6)
    older = harness.add([1] * 7, 12)
    younger = harness.add([2] * 5, 14)
    while younger.status is not RequestStatus.PREEMPTED:
        harness.step()
    # its blocks were freed tail first, so that the older one has not eaten all of them
    known = younger.num_tokens
    while older.status is not RequestStatus.FINISHED:
        harness.step()
    while younger.status is not RequestStatus.RUNNING:
        plan = harness.step()
    (resumed,) = [c for c in plan.cached_requests if c.resumed]
    assert 0 < resumed.num_computed_tokens < known
    # counted before the hit, the whole budget would be filled and run past the end
    left = known - resumed.num_computed_tokens
    assert plan.num_scheduled_tokens[younger.request_id] == min(6, left)
    harness.run()
    assert younger.output_token_ids == reference([2] * 5, 14)
    # a hit on its own blocks is no cached prompt
    assert younger.num_cached_tokens == 0


def test_an_aborted_request_frees_its_blocks_wherever_it_stands():
    harness = Harness(num_blocks=8, block_size=4, max_num_seqs=2)
    running, other, waiting = (harness.add([i] * 5, 18) for i in range(3))
    harness.step()
    harness.scheduler.finish(waiting, "abort")
    while not harness.scheduler.num_preemptions:
        harness.step()
    assert other.status is RequestStatus.PREEMPTED
    harness.scheduler.finish(other, "abort")
    harness.scheduler.finish(running, "abort")
    assert running.finish_reason == "abort"
    harness.pool.check_idle()
    assert not harness.scheduler.requests
    # the runner hears of all three, so that it can forget them
    told = {
        r for p in [*harness.plans, harness.scheduler.schedule()] for r in p.finished_request_ids
    }
    assert told == {r.request_id for r in (running, other, waiting)}


def test_a_request_aborted_during_a_step_takes_no_token_from_it():
    harness = Harness()
    request = harness.add([1, 2], 5)
    plan = harness.scheduler.schedule()
    harness.scheduler.finish(request, "abort")
    assert harness.scheduler.update(harness.runner.execute(plan)) == []
    assert request.output_token_ids == []
    harness.pool.check_idle()


def test_a_step_that_raised_ends_all_requests_and_the_runner_is_told_again():
    harness = Harness(num_blocks=8, block_size=4, max_num_seqs=2)
    done, *others = (harness.add([i] * 5, 9) for i in range(4))
    harness.step()
    harness.scheduler.finish(done, "abort")
    # lost on its way to the runner
    failed = harness.scheduler.schedule()
    harness.plans.append(failed)
    assert failed.finished_request_ids == {done.request_id}
    harness.scheduler.abort_all()
    assert [r.finish_reason for r in others] == ["abort"] * 3
    harness.pool.check_idle()
    again = harness.add([7] * 5, 3)
    harness.run()
    assert not harness.runner.tokens.keys() - {again.request_id}
    assert again.output_token_ids == reference([7] * 5, 3)


def test_a_stop_token_ends_a_request_and_is_its_last_token():
    expected = reference([1, 2, 3], 10)
    harness = Harness()
    request = harness.add([1, 2, 3], 10, stop_token_ids=(expected[4],))
    harness.run()
    assert request.output_token_ids == expected[: expected.index(expected[4]) + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", expected[4])


def test_a_stop_token_that_is_also_the_last_one_allowed_counts_as_a_stop():
    expected = reference([1, 2, 3], 4)
    harness = Harness()
    request = harness.add([1, 2, 3], 4, stop_token_ids=(expected[3],))
    harness.run()
    assert request.output_token_ids == expected
    assert (request.finish_reason, request.stop_reason) == ("stop", expected[3])


workload = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),  # few tokens: many shared prefixes
        st.integers(1, 16),
        st.integers(0, 12),  # the step in which it arrives
        st.none() | st.integers(0, 20),  # steps after which it is aborted
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    workload=workload,
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 10),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    prefix_caching=st.booleans(),
    resumes_as_new=st.booleans(),
)
def test_any_workload_gives_every_request_its_own_tokens_and_leaks_no_block(
    workload, block_size, spare_blocks, budget, max_num_seqs, prefix_caching, resumes_as_new
):
    harness = Harness(
        num_blocks=-(-36 // block_size) + spare_blocks,
        block_size=block_size,
        budget=budget,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
        resumes_as_new=resumes_as_new,
    )
    live, step = [], 0
    pending = sorted(enumerate(workload), key=lambda item: item[1][2])
    while pending or harness.scheduler.requests:
        while pending and pending[0][1][2] <= step:
            index, (prompt, max_tokens, _, abort) = pending.pop(0)
            request = harness.add(prompt, max_tokens, request_id=f"r{index}")
            live.append((request, prompt, max_tokens, None if abort is None else step + abort))
        for request, _, _, abort_at in live:
            if abort_at is not None and abort_at <= step:
                harness.scheduler.finish(request, "abort")
        if harness.scheduler.requests:
            plan = harness.step()
            assert plan.num_scheduled_tokens
            assert len(harness.scheduler.running) <= max_num_seqs
        step += 1
        assert step < 3000
    harness.pool.check_idle()
    for request, prompt, max_tokens, _ in live:
        expected = reference(prompt, max_tokens)
        if request.finish_reason == "abort":
            expected = expected[: len(request.output_token_ids)]
        assert request.output_token_ids == expected
