"""V1 and V2 give the same tokens and log-probabilities, whatever a request asks for (float32)."""

import random

import pytest

from runnerctl import LLM, SamplingParams
from tiny_models import make_tiny_model

# The prompts' own tokens are made likely where it matters, and so are banned ones: every kind
# has to decide tokens, or a runner that ignores it would give the same text.
PROMPT_TOKENS = range(3, 40)
LIKELY = dict.fromkeys(PROMPT_TOKENS, 3.0)
ASKED = {
    "plain": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.4},
    "repetition": {"repetition_penalty": 1.4, "logit_bias": LIKELY},
    "counts": {"presence_penalty": 1.5, "frequency_penalty": 0.6, "logit_bias": LIKELY},
    "late stop": {"min_tokens": 8, "stop_token_ids": [5], "logit_bias": {5: 30.0}},
    "bad words": {
        "bad_words_token_ids": [[7], [9, 11]],
        "logit_bias": {7: 9.0, 9: 9.0, 11: 9.0, 12: 9.0},
    },
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "greedy": {"temperature": 0, "repetition_penalty": 1.2},
}
TIGHT = {"block_size": 4, "num_gpu_blocks_override": 26, "max_num_batched_tokens": 40}


def requests():
    """Two prompts of different lengths for each kind of request, seeded."""
    rng = random.Random(3)
    prompts, params = [], []
    for seed, asked in enumerate(ASKED.values()):
        for length in (3, 21):
            prompts.append([rng.choice(PROMPT_TOKENS) for _ in range(length)])
            kind = {"temperature": 0.9, "seed": 100 + seed, "max_tokens": 14} | asked
            params.append(SamplingParams(**kind))
    return prompts, params


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))


def answers(folder, runner, **settings):
    prompts, params = requests()
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 80, **settings}
    with LLM(folder, runner=runner, **options) as llm:
        outputs = llm.generate(prompts, params)
        alone = [llm.generate(*one)[0] for one in zip(prompts, params, strict=True)]
        return outputs, alone, llm.stats().num_preemptions


@pytest.fixture(scope="module")
def v1(folder):
    return answers(folder, "v1")


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("settings", [{}, TIGHT], ids=["at ease", "under memory pressure"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_same_text_alone_in_a_batch_and_after_a_preemption(folder, v1, runner, settings):
    expected = tokens(v1[0])
    assert len(set(expected)) == len(expected)  # nothing here is the same by accident
    batched, alone, num_preemptions = answers(folder, runner, **settings)
    assert bool(num_preemptions) == bool(settings)
    assert tokens(batched) == expected
    assert tokens(alone) == expected


def test_the_same_text_from_packed_and_compiled_layers(folder, v1):
    batched, alone, _ = answers(folder, "v2", enforce_eager=False)
    assert tokens(batched) == tokens(v1[0])
    assert tokens(alone) == tokens(v1[0])


def test_the_same_log_probabilities(folder, v1):
    checked = 0
    for ours, theirs in zip(answers(folder, "v2", **TIGHT)[0], v1[0], strict=True):
        of_prompt = zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True)
        of_answer = zip(
            ours.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True
        )
        for one, other in [*of_prompt, *of_answer]:
            assert set(one or ()) == set(other or ())
            for token, entry in (one or {}).items():
                assert other[token].rank == entry.rank
                assert other[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
                checked += 1
    assert checked > 100
