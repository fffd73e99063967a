"""Models with recurrent layers on V1: whose state is whose, and what a model is found to bear.

That their tokens are right however they are scheduled is in test_parity.
"""

import logging

import pytest
import torch
from transformers.cache_utils import Cache

from runnerctl import LLM, SamplingParams, UserError
from runnerctl.errors import ModelError
from runnerctl.runner.recurrent_state import LayerPlan, StatePool, state_bytes
from runnerctl_runner_v1.own_cache import OwnCacheServing
from runnerctl_runner_v1.recurrent import RecurrentServing
from tiny_models import make_tiny_model, reference_generate

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def serving_of(llm):
    return llm._engine._executor._runner._serving


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    return make_tiny_model("lfm2", tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="module")
def mamba(tmp_path_factory):
    return make_tiny_model("mamba", tmp_path_factory.mktemp("mamba"))


# The pool


def filled(value, batch=1):
    """A cache whose two recurrent layers hold `value`."""
    cache = Cache(layers=[plan.make() for plan in PLANS])
    for index in (0, 2):
        cache.update_conv_state(torch.full((batch, 3, 4), float(value)), index)
        cache.update_recurrent_state(torch.full((batch, 2, 5), float(value)), index)
    return cache


PLANS = [LayerPlan(True, False), LayerPlan(False, True), LayerPlan(True, True)]


def make_pool(num_slots=4):
    return StatePool(PLANS, filled(9), num_slots)


def state_of(pool, slot):
    cache = pool.load([slot])
    values = {
        float(x) for i in (0, 2) for x in cache.layers[i].recurrent_states[0].flatten().tolist()
    }
    assert len(values) == 1
    return values.pop()


def test_slots_are_the_lowest_free_ones_and_come_back():
    pool = make_pool()
    assert [pool.slot(name) for name in "abc"] == [0, 1, 2]
    assert pool.slot("b") == 1
    pool.release("a")
    pool.release("a")  # nothing to it
    assert [pool.slot(name) for name in "de"] == [0, 3]
    with pytest.raises(RuntimeError, match="more requests"):
        pool.slot("f")


@pytest.mark.parametrize("slots", [[1, 2, 3], [3, 1], [2]])
def test_what_is_stored_in_slots_is_loaded_from_them_and_others_keep_theirs(slots):
    pool = make_pool()
    for slot in range(4):
        pool.store(filled(slot), [slot])
    cache = pool.load(slots)
    states = cache.layers[0].recurrent_states[0]
    assert states[:, 0, 0].tolist() == [float(slot) for slot in slots]
    assert cache.has_previous_state(0)
    states += 10  # as a model does, in place
    cache.layers[2].recurrent_states[0].add_(10)
    pool.store(cache, slots)
    expected = [slot + 10 if slot in slots else slot for slot in range(4)]
    assert [state_of(pool, slot) for slot in range(4)] == expected


def test_the_state_of_slots_that_follow_each_other_is_not_copied():
    pool = make_pool()
    together = pool.load([1, 2]).layers[0].recurrent_states[0]
    apart = pool.load([2, 1]).layers[0].recurrent_states[0]
    together.fill_(7)
    assert pool.load([1, 2]).layers[0].recurrent_states[0].min() == 7
    assert apart.max() == 0


def test_a_fresh_cache_has_no_state():
    pool = make_pool()
    pool.store(filled(5), [0])
    assert not pool.fresh().has_previous_state(0)


def test_the_bytes_of_a_request_are_those_of_its_recurrent_layers():
    assert state_bytes(PLANS, filled(1, batch=3)) == 2 * (3 * 4 + 2 * 5) * 4


# One request and the next


def test_a_request_that_takes_the_slot_of_another_starts_from_nothing(lfm2):
    prompts = [[5, 6, 7], [200, 100], [31]]
    expected = [reference_generate(lfm2, prompt, 8)[0] for prompt in prompts]
    with LLM(lfm2, dtype="float32", max_num_seqs=1) as llm:
        assert llm.decision.runner == "v1"
        outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        assert serving_of(llm)._pool._slot_of.keys() <= {outputs[-1].request_id}
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_requests_of_different_lengths_leave_and_join_and_keep_their_state(lfm2):
    prompts = [[i + 3, i + 40, i + 90] for i in range(9)]
    counts = [3, 14, 1, 7, 10, 2, 12, 5, 8]
    with LLM(lfm2, dtype="float32", max_num_seqs=3) as llm:
        outputs = llm.generate(prompts, [greedy(n) for n in counts])
    for prompt, count, output in zip(prompts, counts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == reference_generate(lfm2, prompt, count)[0]


def test_prefixes_are_not_shared_even_if_asked_for(lfm2):
    prompt = list(range(3, 67))
    with LLM(lfm2, dtype="float32", enable_prefix_caching=True, block_size=4) as llm:
        first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize("family", ["mamba", "lfm2", "bloom"])
def test_log_probabilities_of_a_prompt_are_right_whether_it_comes_in_pieces_or_not(
    family, tmp_path
):
    folder = make_tiny_model(family, tmp_path)
    prompt = list(range(10, 31))
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    said = []
    for budget in (7, 512):
        with LLM(folder, runner="v1", dtype="float32", max_num_batched_tokens=budget) as llm:
            [output] = llm.generate(prompt, params)
        assert output.prompt_logprobs[0] is None
        entries = zip(prompt, output.prompt_logprobs, strict=True)
        said.append([entry[token].logprob for token, entry in entries if entry is not None])
    assert len(said[0]) == len(prompt) - 1
    assert said[0] == pytest.approx(said[1], abs=1e-4)


# What the rehearsal finds


def test_a_model_that_goes_on_in_the_middle_of_a_prompt_is_given_pieces(lfm2):
    with LLM(lfm2, dtype="float32") as llm:
        serving = serving_of(llm)
        assert isinstance(serving, RecurrentServing)
        assert (serving.carries_chunks, serving.replays_answers) == (True, False)


def test_a_model_that_does_not_is_given_whole_prompts(mamba):
    with LLM(mamba, dtype="float32") as llm:
        serving = serving_of(llm)
        assert (serving.carries_chunks, serving.replays_answers) == (False, False)


def test_a_model_whose_two_ways_to_its_state_differ_repeats_an_answer_as_it_was(tmp_path):
    with LLM(make_tiny_model("zamba2", tmp_path), dtype="float32") as llm:
        serving = serving_of(llm)
        assert (serving.carries_chunks, serving.replays_answers) == (False, True)


def test_state_that_is_lost_is_found_out_and_the_model_served_another_way(
    lfm2, monkeypatch, caplog
):
    monkeypatch.setattr(StatePool, "load", lambda self, slots: self.fresh())
    with caplog.at_level(logging.WARNING), LLM(lfm2, dtype="float32") as llm:
        assert isinstance(serving_of(llm), OwnCacheServing)
        assert "does not go on rightly from its recurrent state" in llm.stats().note
        assert llm.stats().dtype == "float32"
        assert "does not go on rightly" in caplog.text
        [output] = llm.generate([5, 6, 7], GREEDY)
    assert list(output.outputs[0].token_ids) == reference_generate(lfm2, [5, 6, 7], 8)[0]


def test_an_exception_of_the_models_code_on_the_way_is_a_reason_too(lfm2, monkeypatch):
    def broken(self, slots):
        raise ValueError("no such state")

    monkeypatch.setattr(StatePool, "load", broken)
    with LLM(lfm2, dtype="float32") as llm:
        assert "ValueError: no such state" in llm.stats().note


def test_a_model_that_keeps_the_past_in_itself_is_refused(tmp_path):
    folder = make_tiny_model("recurrent_gemma", tmp_path)
    with pytest.raises(ModelError, match="keeps the past of a request in the model itself"):
        LLM(folder, runner="v1", dtype="float32")


# Memory


def test_more_requests_than_their_state_has_room_for_is_an_error_with_the_number(mamba):
    with LLM(mamba, dtype="float32") as llm:
        each = serving_of(llm)._model.state_bytes
    assert each > 0
    with pytest.raises(UserError, match="recurrent state of 100000000 requests") as caught:
        LLM(mamba, dtype="float32", max_num_seqs=100_000_000)
    assert "lower max_num_seqs" in caught.value.remedy
