"""Greedy tokens equal those of transformers' `generate` in float32, however they are scheduled.

The way: alone, batched, in chunks, from the prefix cache, and under memory pressure.
A token may differ only where the reference's two best logits are closer than 1e-4;
such cases are counted and printed.
"""

import random
from functools import lru_cache

import pytest

from runnerctl import LLM, SamplingParams
from tiny_models import BYPASSING, RECURRENT, SERVED, make_tiny_model, reference_generate

NEAR_TIE = 1e-4
MAX_TOKENS = 24
LENGTHS = (1, 3, 16, 17, 31, 45)
BLOCK_SIZE = 16


def prompts():
    rng = random.Random(7)
    return [[rng.randrange(3, 256) for _ in range(length)] for length in LENGTHS]


def assert_same_tokens(outputs, references, record_property=None):
    """Compare up to the first difference, which has to be a near tie."""
    near_ties = 0
    for output, (expected, gaps) in zip(outputs, references, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == len(expected)
        differs = [
            i for i, pair in enumerate(zip(tokens, expected, strict=True)) if len(set(pair)) > 1
        ]
        if differs:
            assert gaps[differs[0]] < NEAR_TIE, (
                f"token {differs[0]} is {tokens[differs[0]]}, expected {expected[differs[0]]}; "
                f"the gap is {gaps[differs[0]]}"
            )
            near_ties += 1
    if near_ties:
        print(f"{near_ties} of {len(references)} requests part at a near tie")


def watch_plans(llm):
    """Every plan that is executed from now on."""
    plans, execute = [], llm._engine._executor.execute

    def watched(plan):
        plans.append(plan)
        return execute(plan)

    llm._engine._executor.execute = watched
    return plans


@lru_cache(maxsize=2)
def references_of(folder):
    references = [reference_generate(folder, prompt, MAX_TOKENS) for prompt in prompts()]
    # one token over and over would be equal by accident
    assert len({token for tokens, _ in references for token in tokens}) > 30
    assert sum(len(set(tokens)) > MAX_TOKENS // 3 for tokens, _ in references) >= 3
    return references


# Compiling takes seconds a model; mixtures of experts are packed and not compiled.
NOT_EAGER = ("llama", "gemma2", "mixtral", "deepseek_v2")
SHARING = [(family, runner) for family in SERVED for runner in ("v1", "v2")]
NOT_SHARING = [(family, "v1") for family in (*RECURRENT, *BYPASSING)]


@pytest.fixture(scope="module", params=SHARING + NOT_SHARING, ids="-".join)
def served(request, tmp_path_factory):
    """The settings of a runner, the model and what transformers generates."""
    family, runner = request.param
    folder = make_tiny_model(family, tmp_path_factory.mktemp(family))
    eager = runner == "v2" and family not in NOT_EAGER
    settings = {"runner": runner, "dtype": "float32", "enforce_eager": eager}
    return settings, folder, references_of(folder), request.param in SHARING


GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def test_alone_batched_and_cached(served):
    runner, folder, references, shares_prefixes = served
    with LLM(folder, **runner, block_size=BLOCK_SIZE) as llm:
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts()]
        assert_same_tokens(alone, references)
        assert all(output.num_cached_tokens == 0 for output in alone)
        again = llm.generate(prompts(), GREEDY)
        assert_same_tokens(again, references)
        assert [o.num_cached_tokens for o in again] == [
            (n - 1) // BLOCK_SIZE * BLOCK_SIZE if shares_prefixes else 0 for n in LENGTHS
        ]
    with LLM(folder, **runner, enable_prefix_caching=False) as llm:
        assert_same_tokens(llm.generate(prompts(), GREEDY), references)


def test_in_chunks_of_a_small_budget(served):
    runner, folder, references, _ = served
    with LLM(folder, **runner, max_num_batched_tokens=7, block_size=4) as llm:
        plans = watch_plans(llm)
        assert_same_tokens(llm.generate(prompts(), GREEDY), references)
    assert max(plan.total_num_scheduled_tokens for plan in plans) == 7


def test_preempted_and_resumed(served):
    runner, folder, references, _ = served
    settings = {"block_size": 4, "num_gpu_blocks_override": 26, "max_model_len": 80}
    with LLM(folder, **runner, max_num_batched_tokens=40, **settings) as llm:
        assert_same_tokens(llm.generate(prompts(), GREEDY), references)
        assert llm.stats().num_preemptions > 0
        llm._engine.scheduler.pool.check_idle()


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_scale_of_its_own_is_that_of_the_model(family, tmp_path):
    # in the family as it is made above, the scale is the one a backend would assume
    folder = make_tiny_model(family, tmp_path, query_pre_attn_scalar=200)
    references = [reference_generate(folder, prompt, MAX_TOKENS) for prompt in prompts()]
    with LLM(folder, dtype="float32", block_size=BLOCK_SIZE) as llm:
        assert_same_tokens(llm.generate(prompts(), GREEDY), references)
