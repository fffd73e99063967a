"""What a request may ask for beside its tokens, end to end on a tiny model, in mixed batches."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from runnerctl import LLM, SamplingParams, UserError
from tiny_models import make_tiny_model, reference_generate

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["v1", "v2"])
def llm(request, folder):
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 96, "block_size": 4}
    with LLM(folder, runner=request.param, **options) as llm:
        yield llm


@cache
def reference_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(**changes):
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **changes})


def tokens(output, index=0):
    return list(output.outputs[index].token_ids)


def model_logprobs(folder, token_ids):
    """[len(token_ids), vocab_size]: what transformers thinks comes after each token."""
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([token_ids])).logits[0]
    return logits.double().log_softmax(-1)


def next_logits(folder, token_ids):
    """[vocab_size], float64: transformers' logits for the token after these."""
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([token_ids])).logits[0, -1]
    return torch.tensor(logits.tolist(), dtype=torch.float64)


def beside_others(llm, params, prompt=PROMPT):
    """The output of a request in a batch with plain greedy and sampled ones."""
    others = [
        greedy(),
        SamplingParams(seed=3, max_tokens=9, top_k=5),
        greedy(repetition_penalty=1.5),
    ]
    return llm.generate([[3] * 9, prompt, [4, 4], [11]], [others[0], params, *others[1:]])[1]


# --- log-probabilities


def test_logprobs_are_those_of_the_model(llm, folder):
    output = beside_others(llm, greedy(logprobs=3))
    reference = model_logprobs(folder, PROMPT + tokens(output))
    entries = output.outputs[0].logprobs
    assert len(entries) == 8
    for i, (token, entry) in enumerate(zip(tokens(output), entries, strict=True)):
        expected = reference[len(PROMPT) + i - 1]
        assert list(entry) == expected.topk(3).indices.tolist()
        assert entry[token].rank == 1  # greedy
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[candidate].item(), abs=1e-4)
    total = sum(entry[token].logprob for token, entry in zip(tokens(output), entries, strict=True))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-5)


def test_a_sampled_token_outside_the_top_has_its_logprob_and_rank_too(llm, folder):
    output = beside_others(llm, greedy(temperature=3.0, seed=1, logprobs=1))
    reference = model_logprobs(folder, PROMPT + tokens(output))
    ranks = []
    for i, (token, entry) in enumerate(
        zip(tokens(output), output.outputs[0].logprobs, strict=True)
    ):
        expected = reference[len(PROMPT) + i - 1]
        assert entry[token].logprob == pytest.approx(expected[token].item(), abs=1e-4)
        assert entry[token].rank == 1 + (expected > expected[token]).sum().item()
        ranks.append(entry[token].rank)
    assert max(ranks) > 1


def test_logprobs_none_is_off_and_zero_is_the_token_alone(llm):
    assert beside_others(llm, greedy()).outputs[0].logprobs is None
    entries = beside_others(llm, greedy(logprobs=0)).outputs[0].logprobs
    assert all(len(entry) == 1 for entry in entries)


def test_more_logprobs_than_tokens_is_all_of_them(llm):
    entries = beside_others(llm, greedy(logprobs=10_000, max_tokens=1)).outputs[0].logprobs
    assert len(entries[0]) == 256


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 5}, {"num_gpu_blocks_override": 24}]
)
def test_prompt_logprobs_whole_in_chunks_and_after_preemption(folder, settings):
    prompt = list(range(10, 43))
    with LLM(folder, dtype="float32", max_model_len=96, block_size=4, **settings) as llm:
        llm.generate(prompt, greedy())  # now the prefix is cached, and must not be used
        batch = [[3] * 20, [4] * 20, prompt]
        outputs = llm.generate(batch, [greedy(max_tokens=40)] * 2 + [greedy(prompt_logprobs=2)])
        if "num_gpu_blocks_override" in settings:
            assert llm.stats().num_preemptions > 0
    output = outputs[2]
    assert output.num_cached_tokens == 0
    reference = model_logprobs(folder, prompt)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        entry, expected = output.prompt_logprobs[position], reference[position - 1]
        token = prompt[position]
        assert entry[token].logprob == pytest.approx(expected[token].item(), abs=1e-4)
        assert set(expected.topk(2).indices.tolist()) <= set(entry)


# --- what changes the choice


def test_repetition_penalty_follows_the_model_under_that_penalty(llm, folder):
    output = beside_others(llm, greedy(repetition_penalty=1.8, max_tokens=30))
    known = list(PROMPT)
    for token in tokens(output):
        logits = next_logits(folder, known)
        for seen in set(known):
            logits[seen] = logits[seen] / 1.8 if logits[seen] > 0 else logits[seen] * 1.8
        assert token == int(logits.argmax())
        known.append(token)
    assert tokens(output) != tokens(beside_others(llm, greedy(max_tokens=30)))


@pytest.mark.parametrize(
    ("name", "times"), [("presence_penalty", False), ("frequency_penalty", True)]
)
def test_presence_and_frequency_count_the_answer_only(llm, folder, name, times):
    output = beside_others(llm, greedy(**{name: 2.0, "max_tokens": 20}), [7, 7, 7])
    known = [7, 7, 7]
    for i, token in enumerate(tokens(output)):
        logits = next_logits(folder, known)
        answer = known[3:]
        for seen in set(answer):
            logits[seen] -= 2.0 * (answer.count(seen) if times else 1)
        assert token == int(logits.argmax()), i
        known.append(token)


def test_logit_bias_forces_and_forbids(llm):
    plain = tokens(beside_others(llm, greedy()))
    forced = beside_others(llm, greedy(logit_bias={77: 1e4}))
    assert tokens(forced) == [77] * 8
    without = tokens(beside_others(llm, greedy(logit_bias={plain[0]: -1e4})))
    assert plain[0] not in without


def test_min_tokens_keeps_end_tokens_away_until_then(llm, folder):
    expected, _ = reference_generate(folder, PROMPT, 8)
    stop = expected[2]
    early = beside_others(llm, greedy(stop_token_ids=[stop]))
    assert len(tokens(early)) == expected.index(stop) + 1
    held = beside_others(llm, greedy(stop_token_ids=[stop], min_tokens=6))
    assert stop not in tokens(held)[:6]
    assert len(tokens(held)) >= 6


def test_bad_words_of_one_and_of_several_tokens(llm, folder):
    plain = tokens(beside_others(llm, greedy()))
    one = tokens(beside_others(llm, greedy(bad_words_token_ids=[[plain[3]]])))
    assert plain[3] not in one
    pair = tokens(beside_others(llm, greedy(bad_words_token_ids=[plain[2:4]])))
    assert pair[:3] == plain[:3]  # its first token alone may come
    assert pair[3] != plain[3]
    # a pair that begins in the prompt
    across = tokens(beside_others(llm, greedy(bad_words_token_ids=[[PROMPT[-1], plain[0]]])))
    assert across[0] != plain[0]


def test_min_p_one_is_greedy(llm):
    sampled = greedy(temperature=1.0, seed=5, min_p=1.0)
    assert tokens(beside_others(llm, sampled)) == tokens(beside_others(llm, greedy()))


# --- several answers


def test_n_answers_use_one_seed_each_and_compute_the_prompt_once(llm):
    prompt = list(range(20, 37))
    params = greedy(n=3, temperature=1.0, seed=100)
    (output,) = llm.generate(prompt, params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    singles = [
        tokens(llm.generate(prompt, greedy(temperature=1.0, seed=100 + i))[0]) for i in range(3)
    ]
    assert [tokens(output, i) for i in range(3)] == singles
    assert len({tuple(one) for one in singles}) == 3


def test_the_prompt_of_n_answers_is_computed_once(folder):
    with LLM(folder, dtype="float32", max_model_len=96, block_size=4) as llm:
        scheduled = []
        execute = llm._engine._executor.execute
        llm._engine._executor.execute = lambda plan: (
            scheduled.append(plan.total_num_scheduled_tokens),
            execute(plan),
        )[1]
        llm.generate(list(range(17)), greedy(n=4, max_tokens=1))
    # 17 once, then one token for each of the three others
    assert scheduled == [17, 3]


def test_the_seeds_of_many_answers_stay_within_64_bits(llm):
    params = greedy(n=2, temperature=1.0, seed=2**63 - 1)
    (output,) = llm.generate(PROMPT, params)
    wrapped = llm.generate(PROMPT, greedy(temperature=1.0, seed=-(2**63)))[0]
    assert tokens(output, 1) == tokens(wrapped)


def test_a_stream_of_several_answers_tells_them_apart(llm):
    (whole,) = llm.generate(PROMPT, greedy(n=2, temperature=1.0, seed=9, logprobs=1))
    got, logprobs = {0: [], 1: []}, {0: [], 1: []}
    for delta in llm.stream(PROMPT, greedy(n=2, temperature=1.0, seed=9, logprobs=1)):
        got[delta.output_index] += delta.token_ids
        logprobs[delta.output_index] += delta.logprobs
    assert [got[0], got[1]] == [tokens(whole, 0), tokens(whole, 1)]
    for index in range(2):
        expected = whole.outputs[index].logprobs
        assert [list(entry) for entry in logprobs[index]] == [list(entry) for entry in expected]


# --- abort


def test_an_aborted_answer_ends_and_the_others_go_on(llm, folder):
    stream = llm.stream([PROMPT, [3, 4]], greedy())
    got = {0: [], 1: []}
    reasons = {}
    for delta in stream:
        got[delta.index] += delta.token_ids
        if delta.finish_reason:
            reasons[delta.index] = delta.finish_reason
        if delta.index == 0 and len(got[0]) == 3:
            llm.abort(delta.request_id)
            llm.abort(delta.request_id)  # again changes nothing
    assert reasons == {0: "abort", 1: "length"}
    assert got[0] == reference_generate(folder, PROMPT, 3)[0]
    assert got[1] == reference_generate(folder, [3, 4], 8)[0]
    llm._engine.scheduler.pool.check_idle()
    llm.abort("no such request")


def test_aborting_the_first_of_several_answers_leaves_the_others(llm):
    stream = llm.stream(PROMPT, greedy(n=2, temperature=1.0, seed=9))
    first = next(stream)
    llm.abort(first.request_id)
    rest = [delta for delta in stream if delta.output_index == 1]
    assert sum(len(delta.token_ids) for delta in rest) == 8
    assert rest[-1].finish_reason == "length"


# --- what cannot be


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logit_bias": {256: 1.0}}, "token id 256"),
        ({"bad_words_token_ids": [[3, 999]]}, "token id 999"),
        ({"stop_token_ids": [-1]}, "token id -1"),
        ({"bad_words": "x"}, "tokenizer"),
    ],
)
def test_what_the_model_does_not_know_is_refused_by_name(llm, changes, says):
    with pytest.raises(UserError, match=says) as caught:
        llm.generate([[3], PROMPT], greedy(**changes))
    assert caught.value.setting == next(iter(changes))
    assert not llm._engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("min_tokens", 17),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("logit_bias", {1: float("inf")}),
        ("bad_words", ("",)),
        ("bad_words_token_ids", ((),)),
        ("logprobs", -1),
        ("top_k", 2**70),
        ("max_tokens", "5"),
        ("max_tokens", 2.5),
        ("n", True),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("stop", (3,)),
        ("prompt_logprobs", -1),
    ],
)
def test_parameters_out_of_range_name_the_field(field, value):
    with pytest.raises(UserError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.setting == field


def test_words_and_texts_on_the_default_model(smollm2):
    prompt = "The capital of France is"
    with LLM(smollm2, dtype="float32") as llm:
        (plain,) = llm.generate(prompt, greedy(logprobs=2))
        assert plain.outputs[0].text.startswith(" Paris")
        first = plain.outputs[0].logprobs[0]
        assert first[plain.outputs[0].token_ids[0]].decoded_token == " Paris"
        (without,) = llm.generate(prompt, greedy(bad_words=["Paris"]))
        assert "Paris" not in without.outputs[0].text
        stop = plain.outputs[0].text[1:4]
        (later,) = llm.generate(prompt, greedy(stop=stop, min_tokens=2))
        assert later.outputs[0].text.startswith(" Paris")
        assert len(later.outputs[0].token_ids) >= 2


@pytest.mark.parametrize(
    "changes", [{"stop_token_ids": ["a"]}, {"logit_bias": {"a": 1}}, {"bad_words_token_ids": [3]}]
)
def test_token_ids_of_another_type_say_what_is_expected(changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        SamplingParams(**changes)


def test_numbers_of_numpy_are_as_good():
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=np.array([4]).tolist()
    )
    assert (params.max_tokens, params.temperature) == (3, 0.5)
    assert type(params.max_tokens) is int
