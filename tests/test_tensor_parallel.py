"""Tensor parallelism by transformers' own plan: the same tokens, and refusals before a load."""

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ranks_suite import TIGHT, check_requests, random_requests
from runnerctl import LLM, ModelFacts, decide
from runnerctl.config.tensor_parallel import tensor_parallel_plan, why_not_tensor_parallel
from runnerctl.testing.parity import assert_tokens, greedy, make_prompts, reference_tokens
from runnerctl.testing.tiny_models import SERVED, save_random_model

SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
}


@pytest.fixture(scope="module")
def folders(tiny_folders, tmp_path_factory):
    """Like `tiny_folders`; deepseek_v3 is deepseek_v2 with a plan that leaves attention whole."""
    config = AutoConfig.for_model("deepseek_v3", **SERVED["deepseek_v2"])
    place = tmp_path_factory.mktemp("deepseek_v3")
    v3 = save_random_model(AutoModelForCausalLM, config, place)
    return lambda family: v3 if family == "deepseek_v3" else tiny_folders(family)


@pytest.mark.parametrize(
    ("family", "runner", "settings"),
    [
        ("llama", "v1", {}),
        ("llama", "v2", {}),
        ("llama", "v2", {"prefill_context_parallel_size": 2, "enforce_eager": True}),
        ("gemma2", "v1", {}),
        ("gpt_oss", "v1", {}),
        ("qwen2_moe", "v2", {}),
        ("deepseek_v2", "v1", {}),
        ("deepseek_v2", "v2", {"prefill_context_parallel_size": 2, "enforce_eager": True}),
        ("deepseek_v3", "v2", {}),
    ],
    ids=str,
)
def test_random_requests_on_two_ranks(folders, family, runner, settings):
    """Grouped heads, windows and a soft cap, sinks, experts, latent attention; and with PCP."""
    folder = folders(family)
    with LLM(folder, tensor_parallel_size=2, runner=runner, **{**TIGHT, **settings}) as llm:
        check_requests(llm, folder, random_requests(40))


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_real_model_on_three_ranks(smollm2, runner):
    prompts = make_prompts([2, 5, 90])
    options = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 64}
    with LLM(smollm2, tensor_parallel_size=3, runner=runner, **options) as llm:
        outputs = llm.generate(prompts, greedy(6))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_tokens(smollm2, prompt, greedy(6))
        assert_tokens(output.outputs[0].token_ids, expected, f"{len(prompt)} tokens")


@pytest.mark.parametrize(("family", "factor"), [("llama", 2), ("deepseek_v3", 1)])
def test_a_rank_keeps_the_heads_that_the_plan_gives_it(folders, family, factor):
    """Blocks in the same memory: twice as many where each rank has half of the KV heads."""
    counts = []
    for size in (1, 2):
        settings = {"kv_cache_memory_bytes": 600_000, "enforce_eager": True, "dtype": "float32"}
        with LLM(folders(family), tensor_parallel_size=size, runner="v2", **settings) as llm:
            counts.append(llm.stats().num_blocks)
    assert counts[1] == pytest.approx(factor * counts[0], abs=1)


# ---- without a model


def refusal(config, **settings):
    decision = decide(config, **settings)
    assert not decision.ok
    return "\n".join(str(problem) for problem in decision.errors)


def test_heads_that_do_not_divide_are_refused_and_the_sizes_that_fit_are_named():
    said = refusal(SMOLLM2, tensor_parallel_size=2)
    assert "tensor_parallel_size= is 2" in said
    assert "9 query heads and 3 KV heads" in said
    assert "3 ranks would do" in said
    assert decide(SMOLLM2, tensor_parallel_size=3).ok


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_a_model_without_a_plan_is_refused(model_type):
    said = refusal({"model_type": model_type, "n_head": 4}, tensor_parallel_size=2)
    assert f"no tensor parallel plan for {model_type}" in said
    assert "set tensor_parallel_size= to 1" in said


def test_what_one_process_cannot_hold_is_refused_together_with_what_the_model_cannot():
    said = refusal(SMOLLM2, tensor_parallel_size=2, distributed_executor_backend="uni")
    assert "distributed_executor_backend= is uni" in said
    assert "tensor parallel 2 x prefill context parallel 1" in said
    assert "9 query heads" in said


def test_models_that_are_not_shared_say_so():
    for facts, why in (
        (ModelFacts(runner_type="pooling"), "pooling"),
        (ModelFacts(is_hybrid=True), "recurrent"),
        (ModelFacts(is_attention_free=True), "recurrent"),
    ):
        assert why in why_not_tensor_parallel(facts, 2)[0]


@pytest.mark.parametrize(
    ("facts", "size", "fits"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 2, True),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, False),
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, 2, False),
        ({"num_attention_heads": 8}, 4, True),
        ({}, 7, True),
        ({"num_attention_heads": 8, "num_key_value_heads": 1, "is_mla": True}, 2, True),
    ],
)
def test_which_heads_divide(facts, size, fits):
    why, _ = why_not_tensor_parallel(ModelFacts("llama", **facts), size)
    assert (why == "") is fits


def test_heads_do_not_matter_where_every_rank_has_all_of_them():
    odd = ModelFacts("deepseek_v3", num_attention_heads=7, is_mla=True)
    assert why_not_tensor_parallel(odd, 2) == ("", "")
    assert why_not_tensor_parallel(ModelFacts("deepseek_v2", num_attention_heads=7), 2)[0]


def test_the_plans_are_those_of_transformers():
    """What is read from the source is what the classes have, for every type that is known."""
    compared = 0
    for model_type, kind in CONFIG_MAPPING.items():
        read = tensor_parallel_plan(model_type)
        if read is None:
            continue
        assert dict(read) == (getattr(kind, "base_model_tp_plan", None) or {}), model_type
        compared += bool(read)
    assert compared > 100


def test_nothing_is_claimed_of_types_that_are_not_known():
    assert tensor_parallel_plan("no_such_type") is None
    assert tensor_parallel_plan("../llama") is None
    assert why_not_tensor_parallel(ModelFacts("no_such_type"), 2) == ("", "")
