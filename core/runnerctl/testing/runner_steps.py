"""The step contract, plan by plan: who gets tokens, which, and what a handle owes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runnerctl.runner.step import CachedRequest, StepPlan
from runnerctl.testing.parity import greedy, make_prompts, reference_logprobs, seeded
from runnerctl.testing.runner_under_test import RunnerUnderTest
from runnerctl.testing.scripted import BLOCK_SIZE, MAX_MODEL_LEN, ScriptedRunner

AROUND_A_BLOCK = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 11)


class StepContract(RunnerUnderTest):
    """Part of `RunnerConformance`: handwritten plans, straight to the runner."""

    @pytest.fixture
    def start(self, tiny_model: Path) -> Iterator[Callable[[], ScriptedRunner]]:
        """Starts a runner on a tiny llama; all are shut down after the test."""
        started: list[ScriptedRunner] = []

        def start() -> ScriptedRunner:
            started.append(self._scripted(tiny_model))
            return started[-1]

        yield start
        for script in started:
            script.close()

    @pytest.fixture
    def script(self, start: Callable[[], ScriptedRunner]) -> ScriptedRunner:
        """One started runner."""
        return start()

    def test_a_request_alone(self, script: ScriptedRunner) -> None:
        """A prefill of the whole prompt, then a token a step; lengths around a block."""
        for i, prompt in enumerate(make_prompts(AROUND_A_BLOCK)):
            script.add(f"r{i}", prompt, greedy())
            script.run()
            script.check()
            script.finish(f"r{i}")

    def test_a_batch(self, script: ScriptedRunner) -> None:
        """Ragged prompts together, as many as there may be; each as if it were alone."""
        for i, prompt in enumerate(make_prompts((*AROUND_A_BLOCK, 2, 7))):
            script.add(f"r{i}", prompt, greedy())
        script.run()
        script.check()

    def test_a_prefill_in_chunks(self, script: ScriptedRunner) -> None:
        """No token before the last chunk, then the same tokens as without chunks."""
        for i, prompt in enumerate(make_prompts((11, 9, 8))):
            script.add(f"r{i}", prompt, greedy())
        script.step({"r0": 3, "r1": 1, "r2": BLOCK_SIZE})
        script.step({"r0": 2, "r1": 7, "r2": BLOCK_SIZE})
        script.run()
        script.check()

    def test_a_prefix_from_the_cache(self, script: ScriptedRunner) -> None:
        """Blocks computed for one request serve another; a prompt cached but for its last token."""
        (prompt,) = make_prompts((3 * BLOCK_SIZE,))
        script.add("first", prompt, greedy())
        script.step()
        for name, tail in (("whole", []), ("longer", [5, 6, 7, 8, 9]), ("more", [4])):
            added = script.add(name, [*prompt, *tail], greedy(), prefix_of="first")
            assert added.num_computed == (3 if tail else 2) * BLOCK_SIZE
        script.run()
        script.check()

    def test_a_request_up_to_the_longest_there_may_be(self, script: ScriptedRunner) -> None:
        """`max_model_len` tokens in all, the last of them sampled."""
        (prompt,) = make_prompts((MAX_MODEL_LEN - 12,))
        script.add("long", prompt, greedy(12))
        script.run()
        script.check()

    def test_a_request_left_out_of_some_steps_goes_on(self, script: ScriptedRunner) -> None:
        """While it decodes and in the middle of its prefill; it keeps its blocks."""
        for name, prompt in zip(("a", "b", "c"), make_prompts((5, 9, 6)), strict=True):
            script.add(name, prompt, greedy())
        script.step({"a": 5, "b": 4})
        script.step({"c": 6})
        script.step({"c": 1})
        script.step({"a": 1, "c": 1})
        script.step({"b": 2, "a": 1})
        script.step({"c": 1})
        script.run()
        script.check()

    def test_preempted_and_resumed(self, script: ScriptedRunner) -> None:
        """Others write over its old blocks; it comes back the way the spec says."""
        victim, other, filler = make_prompts((6, 7, 9))
        script.add("victim", victim, greedy())
        script.add("other", other, greedy())
        for _ in range(4):
            script.step()
        script.preempt("victim")
        script.add("filler", filler, greedy())
        script.step({"other": 1, "filler": 9})
        script.step({"other": 1, "filler": 1})
        script.step({"victim": 3, "other": 1})
        script.run()
        script.check()

    def test_preempted_in_the_middle_of_its_prefill(self, script: ScriptedRunner) -> None:
        """Nothing was sampled yet; and it happens twice."""
        for name, prompt in zip(("a", "b"), make_prompts((9, 10)), strict=True):
            script.add(name, prompt, greedy())
        for _ in range(2):
            script.step({"a": 5, "b": script.requests["b"].num_uncomputed})
            script.preempt("a")
            script.step({"b": 1})
        script.run()
        script.check()

    def test_resumed_on_a_cached_prefix(self, script: ScriptedRunner) -> None:
        """Some of its tokens are computed already when it comes back."""
        prompt, tail = make_prompts((2 * BLOCK_SIZE, 3))
        script.add("keeper", prompt, greedy())
        script.add("victim", [*prompt, *tail], greedy())
        for _ in range(3):
            script.step()
        script.preempt("victim")
        script.step({"keeper": 1})
        victim, keeper = script.requests["victim"], script.requests["keeper"]
        victim.block_ids, victim.num_computed = keeper.block_ids[:2], 2 * BLOCK_SIZE
        script.run()
        script.check()

    def test_everything_in_one_step(self, script: ScriptedRunner) -> None:
        """Decodes, a chunk of a prefill, a new request, a resumed one, one left out, one gone."""
        lengths = {"decode": 5, "chunk": 11, "resumed": 6, "idle": 7, "gone": 4}
        for name, prompt in zip(lengths, make_prompts(tuple(lengths.values())), strict=True):
            script.add(name, prompt, seeded(11) if name == "decode" else greedy())
        script.step({**lengths, "chunk": 3})
        script.preempt("resumed")
        script.step({"decode": 1, "idle": 1})
        script.finish("gone")
        script.add("new", make_prompts((9,), seed=8)[0], greedy())
        script.step({"new": 9, "chunk": 4, "resumed": 7, "decode": 1})
        script.run()
        script.check()

    def test_a_finished_request_leaves_nothing_behind(self, script: ScriptedRunner) -> None:
        """Its id is used again: in the same plan, later, and after it was aborted while waiting."""
        for seed, params in enumerate((greedy(), seeded(5), greedy(), seeded(6))):
            for name, prompt in zip("ab", make_prompts((7, 5), seed=seed), strict=True):
                script.add(name, prompt, params)
            script.step({"a": 4, "b": 5})
            if seed == 2:
                script.preempt("a")
            for _ in range(3):
                script.step()
            script.check()
            script.finish("a", "b")
            if seed == 1:
                script.step({})
        script.add("a", [9, 8, 7], greedy())
        script.finish("a")
        script.add("a", [7, 8, 9], greedy())
        script.run()
        script.check()

    @pytest.mark.parametrize("seed", range(3))
    def test_any_sequence_of_plans(self, script: ScriptedRunner, seed: int) -> None:
        """Forty steps at random: arrivals, chunks, pauses, preemptions, ends in any order."""
        rng = random.Random(seed)
        prompts = make_prompts([rng.randrange(1, 14) for _ in range(16)], seed=seed)
        for i, prompt in enumerate(prompts):
            while len(script.requests) >= 6:
                _random_step(script, rng)
            script.add(f"r{i}", prompt, seeded(i) if rng.random() < 0.3 else greedy())
            _random_step(script, rng)
        script.run()
        script.check()

    def test_log_probabilities_for_those_who_ask(self, script: ScriptedRunner) -> None:
        """Of the sampled token and the likeliest ones, as the model gave them; nobody else's."""
        asks = replace(greedy(4), logprobs=3), greedy(4), replace(seeded(3, 4), logprobs=0)
        for name, prompt, params in zip("abc", make_prompts((5, 6, 7)), asks, strict=True):
            script.add(name, prompt, params)
        for _ in range(4):
            known = {name: list(r.token_ids) for name, r in script.requests.items()}
            for name, entry in script.step().logprobs.items():
                request = script.requests[name]
                expected = reference_logprobs(script.folder, known[name])
                assert entry.token_id == request.token_ids[-1]
                assert len(entry.top_token_ids) == request.params.logprobs
                shown = (entry.token_id, *entry.top_token_ids)
                for token, logprob in zip(shown, (entry.logprob, *entry.top_logprobs), strict=True):
                    assert logprob == pytest.approx(expected[token], abs=1e-3), f"token {token}"
                rank = 1 + sum(other > expected[entry.token_id] + 1e-3 for other in expected)
                assert abs(entry.rank - rank) <= 1

    def test_two_runners_in_one_process(self, start: Callable[[], ScriptedRunner]) -> None:
        """They take turns and do not disturb each other."""
        scripts = [start(), start()]
        for script, prompt in zip(scripts, make_prompts((6, 9)), strict=True):
            script.add("r", prompt, greedy(6))
        for _ in range(6):
            for script in scripts:
                script.step()
        for script in scripts:
            script.check()

    def test_an_empty_plan_is_a_step_too(self, script: ScriptedRunner) -> None:
        """It has an id and no tokens, before the first request and between others."""
        assert not script.step({}).sampled_token_ids
        script.add("a", [5, 6, 7], greedy())
        script.step()
        script.step({})
        script.run()
        script.check()

    def test_a_result_is_taken_once(self, script: ScriptedRunner) -> None:
        """A second `result()` is a RuntimeError, not the tokens again and not a wait for ever."""
        script.add("a", [5, 6, 7], greedy())
        handle = script.runner.execute(script.plan())
        handle.result()
        with pytest.raises(RuntimeError):
            handle.result()

    def test_an_error_of_a_step_is_raised_by_its_handle(self, script: ScriptedRunner) -> None:
        """`execute` hands it over; the engine aborts all requests and can go on with others."""
        script.add("a", [5, 6, 7], greedy())
        script.step()
        plan = script.plan()
        broken = StepPlan(
            step_id=plan.step_id,
            cached_requests=(*plan.cached_requests, CachedRequest("nobody", (), 3)),
            num_scheduled_tokens={**plan.num_scheduled_tokens, "nobody": 1},
        )
        try:
            handle = script.runner.execute(broken)
        except Exception as error:
            pytest.fail(f"execute raised {error!r}; the handle should have")
        try:
            result = handle.result()
        except Exception:
            pass
        else:
            pytest.fail(f"a plan with a request that never arrived gave {result}")
        script.requests["a"].num_pending = 0
        script.finish("a")
        script.add("b", [9, 8, 7, 6], greedy())
        script.run()
        script.check()

    def test_steps_in_flight(self, script: ScriptedRunner) -> None:
        """Step n + 1 is submitted before the result of step n, as deep as the spec allows."""
        depth = self.spec.concurrent_batches
        if depth == 1:
            pytest.skip("the spec allows one step at a time")
        for name, prompt in zip("abc", make_prompts((5, 9, 4)), strict=True):
            script.add(name, prompt, seeded(4) if name == "c" else greedy())
        script.submit({"a": 5, "b": 4})
        for i in range(8):
            while len(script.in_flight) < depth:
                # one waits every third step, and one is in the middle of its prefill at first
                script.submit({"b": 5 if i == 0 and script.requests["b"].num_computed == 4 else 1})
            script.take()
        _take_all(script)
        script.check()

    def test_finished_while_its_step_is_in_flight(self, script: ScriptedRunner) -> None:
        """That step still owes its token. Its id is used again at once, its blocks are not."""
        prompts = make_prompts((5, 9, 4, 7, 6))
        for name, prompt in zip("abc", prompts, strict=False):
            script.add(name, prompt, seeded(4) if name == "a" else greedy())
        script.submit_ahead()
        script.submit_ahead()
        gone = script.requests["a"], script.requests["c"]
        script.finish("a", "c")
        for name, prompt in zip("ad", prompts[3:], strict=True):
            script.add(name, prompt, greedy())
        for _ in range(4):
            script.submit_ahead()
        _take_all(script)
        assert [len(request.output) for request in gone] == [2, 2]
        script.run()
        script.check()
        script.requests = {request.request_id: request for request in gone}
        script.check()

    def test_preempted_while_its_step_is_in_flight(self, script: ScriptedRunner) -> None:
        """That step still owes its token, with which the request comes back when it is there."""
        for name, prompt in zip("ab", make_prompts((6, 9)), strict=True):
            script.add(name, prompt, seeded(4) if name == "a" else greedy())
        for round_ in range(2):
            script.submit_ahead()
            script.submit_ahead()
            script.preempt("a")
            script.add(f"filler {round_}", make_prompts((9,), seed=round_)[0], greedy())
            script.submit_ahead()
            while script.requests["a"].num_pending:
                script.take()
        _take_all(script)
        script.run()
        script.check()


def _take_all(script: ScriptedRunner) -> None:
    while script.in_flight:
        script.take()


def _random_step(script: ScriptedRunner, rng: random.Random) -> None:
    """End what is done, preempt somebody now and then, and compute a random part of the rest."""
    preempted = set()
    for name, request in list(script.requests.items()):
        if len(request.output) >= request.params.max_tokens or rng.random() < 0.03:
            script.check(name)
            script.finish(name)
        elif request.num_computed and rng.random() < 0.1:
            script.preempt(name)
            preempted.add(name)
    names = [name for name in script.requests if name not in preempted and rng.random() < 0.8]
    rng.shuffle(names)
    uncomputed = {name: script.requests[name].num_uncomputed for name in names}
    script.step({name: rng.randint(1, count) for name, count in uncomputed.items()})
