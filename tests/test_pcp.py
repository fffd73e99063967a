"""Prefill context parallelism end to end: the same tokens as one process and as transformers."""

from contextlib import contextmanager

import pytest
import torch

from ranks_suite import TIGHT, check_requests, random_requests
from runnerctl import LLM, SamplingParams, decide
from runnerctl.resolve import resolve
from runnerctl.runner.protocol import WorkerContext
from runnerctl.runner.rank_groups import RankGroups
from runnerctl.runner.step import NewRequest, StepPlan
from runnerctl.testing.parity import assert_tokens, greedy, make_prompts, reference_tokens
from runnerctl_pcp.share import PrefillSplit
from runnerctl_runner_v2.runner import ModelRunnerV2


@pytest.mark.parametrize(
    ("family", "size", "count", "eager"),
    [
        ("llama", 2, 200, True),
        ("llama", 4, 40, False),
        ("deepseek_v2", 2, 60, True),
        ("gemma2", 3, 40, True),
        ("mixtral", 2, 40, False),
    ],
)
def test_random_requests(tiny_folders, family, size, count, eager):
    """Grouped heads and compressed ones, windows and a soft cap, experts; compiled, too."""
    folder = tiny_folders(family)
    settings = {**TIGHT, "prefill_context_parallel_size": size, "enforce_eager": eager}
    with LLM(folder, **settings) as llm:
        check_requests(llm, folder, random_requests(count))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_real_model(smollm2, size):
    prompts = make_prompts([2, 5, 90, 200])
    options = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 128}
    with LLM(smollm2, prefill_context_parallel_size=size, **options) as llm:
        outputs = llm.generate(prompts, greedy(6))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_tokens(smollm2, prompt, greedy(6))
        assert_tokens(output.outputs[0].token_ids, expected, f"{len(prompt)} tokens")


def test_log_probabilities_of_prompts_come_back_in_order(tiny_folders):
    folder = tiny_folders("llama")
    prompts = make_prompts([3, 30])
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, logprobs=1)
    settings = {**TIGHT, "enable_prefix_caching": False, "enforce_eager": True}
    with LLM(folder, runner="v2", **settings) as llm:
        alone = llm.generate(prompts, params)
    with LLM(folder, prefill_context_parallel_size=2, **settings) as llm:
        shared = llm.generate(prompts, params)
    compared = 0
    for one, other in zip(alone, shared, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for ours, theirs in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            for token, entry in (ours or {}).items():
                assert theirs[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
                compared += 1
    assert compared > 30


# ---- one rank of several, without the others


class Alone:
    """A group whose other ranks give what this one gives: shapes are right, values are not."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def all_gather(self, tensor):
        return torch.stack([tensor] * self.size)


@contextmanager
def one_rank(folder, monkeypatch, rank, size):
    """A V2 runner that is one rank of a group; with it what its splitter and model were given."""
    resolved = resolve(
        folder, prefill_context_parallel_size=2, dtype="float32", enforce_eager=True, block_size=4
    )
    groups = RankGroups(Alone(rank, size))
    context = WorkerContext(
        resolved.config, resolved.decision, folder, resolved.host, groups=groups
    )
    seen = {"split": [], "run": []}
    split = PrefillSplit.split

    def spy(self, batch):
        seen["split"].append(batch.max_query_len)
        return split(self, batch)

    monkeypatch.setattr(PrefillSplit, "split", spy)
    runner = ModelRunnerV2(context)
    try:
        runner.load()
        runner.initialize_kv_cache(40, 128)
        base = runner._model._model.base_model
        base.register_forward_pre_hook(
            lambda _, __, kwargs: seen["run"].append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        yield runner, seen
    finally:
        runner.shutdown()


def prefill(name, tokens, first_block):
    blocks = tuple(range(first_block, first_block + len(tokens) // 4 + 1))
    params = SamplingParams(temperature=0, seed=0)
    return NewRequest(name, tuple(tokens), params, len(tokens), frozenset(), blocks, 0)


def test_the_warm_up_goes_through_the_splitter_too(tiny_folders, monkeypatch):
    with one_rank(tiny_folders("llama"), monkeypatch, 0, 1) as (runner, seen):
        runner.warm_up()
        assert max(seen["split"]) > 1
        assert min(seen["split"]) == 1
        assert len(seen["split"]) == len(seen["run"])


def test_a_group_of_one_computes_what_nobody_splits(tiny_folders, monkeypatch):
    folder = tiny_folders("llama")
    prompts = make_prompts([21, 2])
    with one_rank(folder, monkeypatch, 0, 1) as (runner, _):
        new = [prefill(str(i), prompt, 10 * i) for i, prompt in enumerate(prompts)]
        counts = {one.request_id: len(one.prefill_token_ids) for one in new}
        tokens = runner.execute(StepPlan(1, tuple(new), (), counts)).result().sampled_token_ids
    for i, prompt in enumerate(prompts):
        assert tokens[str(i)] == reference_tokens(folder, prompt, greedy())[0][0]


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (0, 4), (3, 4)])
def test_the_model_of_a_rank_runs_its_part_of_the_tokens_only(
    tiny_folders, monkeypatch, rank, size
):
    with one_rank(tiny_folders("llama"), monkeypatch, rank, size) as (runner, seen):
        for length in (2, 7, 50, 101):
            (prompt,) = make_prompts([length])
            new = prefill("a", prompt, 0)
            runner.execute(StepPlan(1, (new,), (), {"a": length})).result()
            assert 1 <= seen["run"][-1] <= 2 * -(-length // (2 * size)) + 1


def refusal(config, **settings):
    decision = decide(config, **settings)
    assert not decision.ok
    return "\n".join(str(problem) for problem in decision.errors)


def test_what_cannot_be_split_is_refused_with_reasons_before_anything_loads():
    hybrid = {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
    }
    said = refusal(hybrid, prefill_context_parallel_size=2)
    assert "hybrid" in said
    assert "prefill_context_parallel_size" in said
    pooling = {"model_type": "bert", "architectures": ["BertModel"]}
    assert "pooling" in refusal(pooling, prefill_context_parallel_size=2)
    mamba = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}
    assert "attention_free" in refusal(mamba, prefill_context_parallel_size=2)


def test_v1_is_refused_and_says_why(tiny_folders):
    assert "v2" in refusal(tiny_folders("llama"), prefill_context_parallel_size=2, runner="v1")


def test_without_the_plugin_nobody_splits(tiny_folders):
    said = refusal(tiny_folders("llama"), prefill_context_parallel_size=2, plugins=["no:pcp"])
    assert "pcp" in said
