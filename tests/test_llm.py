"""`LLM` as its users call it, on a tiny model without a tokenizer."""

import gc
import json
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from runnerctl import (
    LLM,
    ConfigError,
    EngineConfig,
    ModelError,
    PromptError,
    SamplingParams,
    UserError,
)
from runnerctl.executor.uniproc import UniprocExecutor
from runnerctl.runner.noise import gumbel_noise
from tiny_models import make_tiny_model, reference_generate

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, dtype="float32", max_model_len=64) as llm:
        yield llm


def tokens(output):
    return list(output.outputs[0].token_ids)


def test_every_spelling_of_a_prompt_of_tokens_gives_the_same(llm, folder):
    expected, _ = reference_generate(folder, [5, 6, 7], 8)
    one = [5, 6, 7]
    for spelling in (one, [one], {"prompt_token_ids": one}, [{"prompt_token_ids": tuple(one)}]):
        (output,) = llm.generate(spelling, GREEDY)
        assert tokens(output) == expected
        assert output.prompt_token_ids == (5, 6, 7)
        assert output.finished
        assert output.outputs[0].finish_reason == "length"
    first, second = llm.generate([one, {"prompt_token_ids": [9]}], GREEDY)
    assert tokens(first) == expected
    assert tokens(second) == reference_generate(folder, [9], 8)[0]
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([[]], "is empty"),
        ({"prompt_token_ids": []}, "is empty"),
        ([3, 256], "token id 256, but this model knows 0 to 255"),
        ([3, -1], "token id -1"),
        ([1] * 64, "has 64 tokens; prompt and answer together may have 64"),
        ("text", "has no tokenizer"),
        ([[1], "text"], "prompt 1 is text"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "keys"),
        ({"promt_token_ids": [1]}, "promt_token_ids"),
        ([1.5], "float"),
        ([True], "neither text nor"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_a_prompt_that_cannot_be_served_says_why(llm, prompt, says):
    with pytest.raises(PromptError, match="prompt") as caught:
        llm.generate(prompt, GREEDY)
    assert says in str(caught.value)
    # nothing is left behind
    assert not llm._engine.has_unfinished_requests


def test_a_bad_prompt_among_good_ones_names_its_place_and_starts_nothing(llm):
    with pytest.raises(PromptError, match="prompt 2"):
        llm.stream([[1], [2], [999]], GREEDY)
    assert not llm._engine.has_unfinished_requests


def test_one_params_for_each_prompt(llm):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (2, 5)]
    outputs = llm.generate([[5], [6]], params)
    assert [len(tokens(o)) for o in outputs] == [2, 5]
    with pytest.raises(UserError, match="2 prompts came with 3 SamplingParams"):
        llm.generate([[5], [6]], [*params, GREEDY])


def test_the_answer_ends_where_the_context_ends(llm, folder):
    (output,) = llm.generate(
        [7] * 60, SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    )
    assert tokens(output) == reference_generate(folder, [7] * 60, 4)[0]
    assert output.outputs[0].finish_reason == "length"


def test_a_stop_token_ends_the_answer(llm, folder):
    expected, _ = reference_generate(folder, [5, 6, 7], 8)
    stop = expected[3]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    (output,) = llm.generate([5, 6, 7], params)
    completion = output.outputs[0]
    assert list(completion.token_ids) == expected[: expected.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_the_models_own_end_tokens_end_the_answer_unless_they_are_ignored(folder, tmp_path):
    expected, _ = reference_generate(folder, [5, 6, 7], 8)
    shutil.copytree(folder, tmp_path / "model")
    # the checkpoint names several; any of them ends the text
    generation = {"eos_token_id": [255, expected[2]]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    with LLM(tmp_path / "model", dtype="float32") as llm:
        (stopped,) = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8))
        assert tokens(stopped) == expected[: expected.index(expected[2]) + 1]
        assert stopped.outputs[0].finish_reason == "stop"
        (ignored,) = llm.generate([5, 6, 7], GREEDY)
        assert tokens(ignored) == expected


def test_stop_strings_need_a_tokenizer(llm):
    with pytest.raises(UserError, match="tokenizer"):
        llm.generate([1], SamplingParams(stop=("x",)))


def sampled(llm, prompts, **changes):
    settings = {"temperature": 1.0, "max_tokens": 12, "seed": 11, "ignore_eos": True} | changes
    return [tokens(output) for output in llm.generate(prompts, SamplingParams(**settings))]


def test_a_seeded_request_gives_the_same_tokens_alone_in_a_batch_and_under_pressure(llm, folder):
    prompt = [5, 6, 7, 8]
    (alone,) = sampled(llm, [prompt])
    batch = [[9] * 20, prompt, [3], [12, 13]]
    assert sampled(llm, batch)[1] == alone
    assert len(set(alone)) > 4
    small = {"block_size": 4, "num_gpu_blocks_override": 11, "max_model_len": 40}
    with LLM(folder, dtype="float32", max_num_batched_tokens=5, **small) as pressed:
        assert sampled(pressed, batch)[1] == alone
        assert pressed.stats().num_preemptions > 0
    assert sampled(llm, [prompt], seed=12) != [alone]


def test_without_a_seed_two_runs_differ(llm):
    assert sampled(llm, [[5]], seed=None) != sampled(llm, [[5]], seed=None)


def test_top_k_one_is_greedy(llm):
    greedy = [
        tokens(o)
        for o in llm.generate(
            [[5, 6]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        )
    ]
    assert sampled(llm, [[5, 6]], top_k=1) == greedy


def test_a_stream_gives_each_token_when_it_is_there(llm, folder):
    expected = {i: reference_generate(folder, p, 8)[0] for i, p in enumerate([[5], [6, 7]])}
    seen, order = {0: [], 1: []}, []
    for delta in llm.stream([[5], [6, 7]], GREEDY):
        seen[delta.index] += delta.token_ids
        order.append(delta.index)
        assert (delta.finish_reason is not None) == (len(seen[delta.index]) == 8)
    assert seen == expected
    assert order == [0, 1] * 8


def test_closing_a_stream_aborts_its_requests_and_no_others(llm, folder):
    ours, theirs = llm.stream([5], GREEDY), llm.stream([[6, 7]], GREEDY)
    next(ours)
    got = [*next(theirs).token_ids]
    ours.close()
    assert len(llm._engine.scheduler.requests) == 1
    got += [token for delta in theirs for token in delta.token_ids]
    assert got == reference_generate(folder, [6, 7], 8)[0]
    llm._engine.scheduler.pool.check_idle()


def test_a_stream_that_is_never_read_leaves_nothing_behind(llm):
    stream = llm.stream([[5], [6, 7]], GREEDY)
    assert len(llm._engine.scheduler.requests) == 2
    del stream
    assert not llm._engine.has_unfinished_requests
    assert not llm._live


def test_a_stream_that_waits_while_others_run_loses_no_token(llm, folder):
    unread, begun = llm.stream([9], GREEDY), llm.stream([6, 7], GREEDY)
    first = next(begun)
    # runs both to their ends
    llm.generate([5], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    steps = llm.stats().num_steps
    got = [first, *begun]
    assert [t for d in got for t in d.token_ids] == reference_generate(folder, [6, 7], 8)[0]
    assert [d.finish_reason for d in got] == [None] * 7 + ["length"]
    assert [t for d in unread for t in d.token_ids] == reference_generate(folder, [9], 8)[0]
    assert llm.stats().num_steps == steps
    assert not llm._live


def test_a_stream_of_an_llm_that_was_closed_says_so(folder):
    with LLM(folder) as llm:
        stream, unread = llm.stream([5], GREEDY), llm.stream([6], GREEDY)
        next(stream)
    for deltas in (stream, unread):
        with pytest.raises(UserError, match="closed"):
            list(deltas)


def test_two_engines_side_by_side_do_not_disturb_each_other(llm, folder, tmp_path):
    other_folder = make_tiny_model("gpt2", tmp_path, seed=3)
    with LLM(other_folder, dtype="float32") as other:
        mine, its = llm.stream([5, 6], GREEDY), other.stream([5, 6], GREEDY)
        got = [(next(mine).token_ids[0], next(its).token_ids[0]) for _ in range(8)]
    assert [a for a, _ in got] == reference_generate(folder, [5, 6], 8)[0]
    assert [b for _, b in got] == reference_generate(other_folder, [5, 6], 8)[0]


def test_an_error_in_a_step_is_raised_and_leaves_the_engine_usable(llm, folder):
    execute = llm._engine._executor.execute

    def broken(plan):
        raise RuntimeError("the device is on fire")

    stream = llm.stream([7], GREEDY)
    first = next(stream)
    llm._engine._executor.execute = broken
    with pytest.raises(RuntimeError, match="on fire"):
        llm.generate([[5], [6]], GREEDY)
    llm._engine._executor.execute = execute
    llm._engine.scheduler.pool.check_idle()
    # whose request ran in that step but who did not run the step hears of it
    assert [(d.token_ids, d.finish_reason) for d in [first, *stream]] == [
        (first.token_ids, None),
        ((), "abort"),
    ]
    assert not llm._live
    (output,) = llm.generate([5], GREEDY)
    assert tokens(output) == reference_generate(folder, [5], 8)[0]


def test_an_error_in_anothers_step_ends_answers_that_were_not_queued_yet(llm, monkeypatch):
    several = SamplingParams(temperature=1, seed=1, max_tokens=4, n=3)
    stream = llm.stream([7], several)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine._executor, "execute", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([5], GREEDY)
    assert [(d.output_index, d.finish_reason) for d in stream] == [
        (0, "abort"),
        (1, "abort"),
        (2, "abort"),
    ]


def test_a_failed_start_shuts_the_runner_down(folder, monkeypatch):
    closed = []

    def shutdown(executor):
        closed.append(executor)

    monkeypatch.setattr(UniprocExecutor, "shutdown", shutdown)
    with pytest.raises(UserError):
        LLM(folder, kv_cache_memory_bytes=1000)
    assert len(closed) == 1


def test_the_noise_of_a_token_is_that_of_its_place_in_the_sequence(llm, folder):
    """What `gumbel_noise` promises every runner, on the first two sampled tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=2, ignore_eos=True)
    (output,) = llm.generate([5, 6, 7], params)
    sequence = [5, 6, 7]
    for token in tokens(output):
        with torch.inference_mode():
            logits = model(torch.tensor([sequence])).logits[0, -1]
        place = torch.tensor([len(sequence)])
        noise = gumbel_noise(torch.tensor([11]), place, torch.arange(256).unsqueeze(0))
        assert token == (logits + noise[0]).argmax().item()
        sequence.append(token)


def test_an_interrupted_step_leaves_the_engine_usable(llm, folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine._executor._runner, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6]], GREEDY)
    assert not llm._engine.has_unfinished_requests
    (output,) = llm.generate([5], GREEDY)
    assert tokens(output) == reference_generate(folder, [5], 8)[0]
    assert set(llm._engine._executor._runner._table._rows) == {output.request_id}


@pytest.mark.parametrize(
    "params", [[GREEDY, None], [GREEDY, {"max_tokens": 3}], {"max_tokens": 3, "n": 2}], ids=str
)
def test_what_is_no_sampling_params_is_refused_and_starts_nothing(llm, params):
    with pytest.raises(UserError) as caught:
        llm.generate([[5], [6]], params)
    assert caught.value.setting == "sampling_params"
    assert not llm._engine.has_unfinished_requests


def test_a_request_that_cannot_be_queued_takes_back_those_before_it(llm):
    with pytest.raises(UserError, match="token id 999"):
        llm.generate([[5], [6]], [GREEDY, SamplingParams(stop_token_ids=[999])])
    assert not llm._engine.has_unfinished_requests
    assert not llm._live


def test_closing_frees_the_model_and_says_so_afterwards(folder):
    with LLM(folder) as llm:
        layer = weakref.ref(llm._engine._executor._runner._model._model.model.layers[0].self_attn)
        llm.generate([5], GREEDY)
        gc.collect()
        gc.disable()  # at once, not when the collector next comes by
    try:
        assert layer() is None
    finally:
        gc.enable()
    llm.close()
    with pytest.raises(UserError, match="closed"):
        llm.generate([5], GREEDY)


def test_the_decision_travels_with_the_llm(llm):
    assert llm.decision.runner == "v2"
    assert llm.decision.ok


def test_a_configuration_that_cannot_be_served_raises_before_anything_loads(folder):
    with pytest.raises(ConfigError) as caught:
        LLM(folder, runner="v1", prefill_context_parallel_size=2)
    assert caught.value.decision.runner is None
    assert "prefill_context_parallel_size" in str(caught.value)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(folder, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="did you mean"):
        LLM(folder, max_num_seq=4)


def test_a_model_without_attention_is_refused_on_v2_by_name_before_anything_loads(tmp_path):
    config = {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "state_size": 16,
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    # there are no weights: nothing may have looked for them
    with pytest.raises(ConfigError, match="attention_free"):
        LLM(tmp_path, runner="v2")


def test_a_cache_too_small_for_one_request_says_what_to_change(folder):
    with pytest.raises(UserError) as caught:
        LLM(folder, max_model_len=100, block_size=16, num_gpu_blocks_override=3)
    assert "needs 7 KV blocks of 16 tokens, but there is room for 3 (48 tokens)" in str(
        caught.value
    )
    assert "num_gpu_blocks_override=" in str(caught.value)
    with pytest.raises(UserError, match="does not hold one block"):
        LLM(folder, kv_cache_memory_bytes=1000)
    with pytest.raises(UserError, match="of memory that are free") as caught:
        LLM(folder, num_gpu_blocks_override=10**12)
    assert caught.value.setting == "num_gpu_blocks_override="


def test_the_context_shrinks_to_the_cache_when_nobody_asked_for_more(folder):
    with LLM(folder, block_size=16, num_gpu_blocks_override=3) as llm:
        assert llm.max_model_len == 48
        with pytest.raises(PromptError, match="48"):
            llm.generate([1] * 48)
    # 3 layers x 2 heads x (16 + 16) x 4 bytes = 768 bytes a token
    with LLM(folder, block_size=16, kv_cache_memory_bytes=768 * 16 * 5 + 100) as llm:
        assert llm._engine.cache_size.num_blocks == 5


def test_an_unknown_model_is_an_error_that_names_it():
    with pytest.raises((ConfigError, ModelError), match="no-such-model"):
        LLM("no-such-model")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("stop", ("",)),
        ("seed", 2**63),
    ],
)
def test_sampling_parameters_out_of_range_name_the_field(field, value):
    with pytest.raises(UserError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.setting == field


def test_the_threads_settings_are_left_as_they_were(folder):
    before = torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    with LLM(folder) as llm:
        llm.generate([5], GREEDY)
    assert before == (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


def test_without_the_engines_packages_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr("runnerctl.engine.requirements.ENGINE_MODULES", ("no_such_package",))
    with pytest.raises(UserError, match="no_such_package") as caught:
        LLM(folder)
    assert "pip install 'runnerctl[engine]'" in str(caught.value)


def test_asking_for_llm_imports_no_torch():
    code = "import sys; from runnerctl import LLM; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_resolved_configuration_can_be_given_instead_of_a_model(folder):
    config = EngineConfig(model={"model": str(folder), "dtype": "float32"}, cache={"block_size": 4})
    with LLM(config) as llm:
        (output,) = llm.generate([5, 6, 7], GREEDY)
        assert tokens(output) == reference_generate(folder, [5, 6, 7], 8)[0]


def test_settings_at_fault_are_reported_together(folder):
    with pytest.raises(ConfigError) as caught:
        LLM(folder, block_size=0, max_model_len=10_000, attention_backend="spda")
    for named in ("block_size=", "max_model_len=", "attention_backend="):
        assert named in str(caught.value)


def test_a_prompt_that_is_too_long_names_the_limit_as_it_was_set(folder, monkeypatch):
    monkeypatch.setenv("RUNNERCTL_MAX_MODEL_LEN", "20")
    with LLM(folder) as llm, pytest.raises(PromptError) as caught:
        llm.generate([5] * 20)
    assert caught.value.setting == "RUNNERCTL_MAX_MODEL_LEN"


def test_a_prompt_too_long_for_the_cache_names_what_limits_the_cache(folder):
    with LLM(folder, num_gpu_blocks_override=2) as llm, pytest.raises(PromptError) as caught:
        llm.generate([5] * 40)
    assert caught.value.setting == "num_gpu_blocks_override="


def test_half_a_character_is_refused_before_the_tokenizer_sees_it(smollm2):
    with LLM(smollm2) as llm, pytest.raises(PromptError, match="prompt 1 has half a character"):
        llm.generate(["fine", "not \ud800 fine"])
