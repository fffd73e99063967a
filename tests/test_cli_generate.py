"""`runnerctl generate` over a stand-in for the engine: what goes where, and the exit codes."""

import json
import sys
import types
from dataclasses import fields
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from runnerctl.cli import sampling_flags
from runnerctl.cli.app import app
from runnerctl.engine.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.engine.stats import EngineStats
from runnerctl.errors import ModelError, PromptError, UserError


class FakeLLM:
    """Answers every prompt with two deltas; remembers what it was asked."""

    made: ClassVar[list["FakeLLM"]] = []
    has_chat_template = True
    max_model_len = 7
    fails: Exception | None = None

    def __init__(self, resolved) -> None:
        self.resolved, self.closed = resolved, False
        FakeLLM.made.append(self)

    @classmethod
    def from_resolved(cls, resolved):
        return cls(resolved)

    def chat_prompt(self, messages):
        self.messages = messages
        return [1, 2, 3] if self.has_chat_template else None

    def stream(self, prompts, params):
        self.prompts, self.params = prompts, params
        if FakeLLM.fails:
            raise FakeLLM.fails
        # further answers come in between
        for text, token_id, ends in (("Grüß ", 7, None), ("dich", 8, "length")):
            for i in range(params.n):
                answer = text if i == 0 else f"{text}{i}"
                yield StreamDelta(f"0.{i}", 0, answer, (token_id,), ends, output_index=i)

    def generate(self, prompts, params):
        deltas = list(self.stream(prompts, params))
        asked = params.logprobs is not None
        likely = ({7: Logprob(-0.5, 2, "a"), 9: Logprob(float("-inf"), 1, "b")},) if asked else None
        outputs = [
            CompletionOutput(
                index=i,
                text="".join(d.text for d in deltas if d.output_index == i),
                token_ids=(7, 8),
                finish_reason="length",
                logprobs=likely,
            )
            for i in range(params.n)
        ]
        asked = params.prompt_logprobs is not None
        before = (None, {3: Logprob(-1.0, 1, "c")}) if asked else None
        return [RequestOutput("0", None, (1, 3), tuple(outputs), 4, True, before)]

    def stats(self):
        return EngineStats(num_prompt_tokens=5, num_generated_tokens=2, step_time_s=0.25)

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch, tmp_path):
    for name in ("RUNNERCTL_RUNNER", "VLLM_USE_V2_MODEL_RUNNER", "RUNNERCTL_MODEL"):
        monkeypatch.delenv(name, raising=False)
    module = types.ModuleType("runnerctl.engine.llm")
    module.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "runnerctl.engine.llm", module)
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "fails", None)
    monkeypatch.setattr(FakeLLM, "has_chat_template", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], '
        '"num_attention_heads": 4, "num_hidden_layers": 2}'
    )


def run(*arguments: str, stdin: str | None = None, code: int = 0):
    result = CliRunner().invoke(app, ["generate", "--model", ".", *arguments], input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_stdout_holds_the_answer_and_nothing_else() -> None:
    result = run("hello")
    assert result.stdout == "Grüß dich\n"
    assert "v2 serves ." in result.stderr
    assert FakeLLM.made[0].closed


def test_the_chat_template_is_used_unless_raw() -> None:
    run("hello", "--system", "Be brief.")
    assert FakeLLM.made[0].prompts == [{"prompt_token_ids": [1, 2, 3]}]
    assert FakeLLM.made[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    run("hello", "--raw")
    assert FakeLLM.made[1].prompts == ["hello"]


def test_a_system_message_next_to_raw_is_refused_before_anything_is_loaded() -> None:
    assert "--system" in run("hello", "--raw", "--system", "Be brief.", code=2).stderr
    assert FakeLLM.made == []


def test_a_model_without_a_chat_template_continues_the_prompt(monkeypatch) -> None:
    monkeypatch.setattr(FakeLLM, "has_chat_template", False)
    run("hello")
    assert FakeLLM.made[0].prompts == ["hello"]
    assert "--system" in run("hello", "--system", "Be brief.", code=2).stderr


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_the_prompt_may_come_from_stdin(arguments) -> None:
    run(*arguments, "--raw", stdin="two\nlines\n")
    assert FakeLLM.made[0].prompts == ["two\nlines\n"]


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_the_users_fault(prompt) -> None:
    assert "prompt is empty" in run(prompt, code=2).stderr
    assert "prompt is empty" in run(stdin=prompt, code=2).stderr
    assert FakeLLM.made == []


def test_bytes_that_the_locale_could_not_read_are_read_as_utf8() -> None:
    run("caf\udcc3\udca9", "--raw")
    assert FakeLLM.made[0].prompts == ["café"]
    assert "UTF-8" in run("caf\udce9", code=2).stderr
    assert "--system" in run("hello", "--system", "caf\udce9", code=2).stderr
    assert len(FakeLLM.made) == 1


def test_an_answer_cut_short_by_the_context_says_so() -> None:
    result = run("hello")
    assert "cut short" in result.stderr
    assert "7 tokens" in result.stderr
    assert "cut short" not in run("hello", "--max-tokens", "2").stderr


def test_a_model_that_is_not_there_is_named_by_its_flag() -> None:
    result = CliRunner().invoke(app, ["generate", "hello", "--model", "./nothere"])
    assert result.exit_code == 2
    assert "--model: ./nothere" in result.stderr


def test_a_terminal_without_a_prompt_is_told_what_to_do(monkeypatch) -> None:
    from runnerctl.cli import generate

    terminal = types.SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(generate.sys, "stdin", terminal)
    with pytest.raises(PromptError, match="runnerctl generate"):
        generate._read_prompt(None)


def test_sampling_flags_reach_the_engine() -> None:
    flags = "--max-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.9 --seed 6 --ignore-eos"
    run("hello", *flags.split(), "--stop", "a", "--stop", "b c")
    assert FakeLLM.made[0].params == SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        seed=6,
        stop=("a", "b c"),
        ignore_eos=True,
    )


def test_the_rarer_sampling_flags_reach_the_engine() -> None:
    flags = (
        "-n 2 --min-tokens 1 --min-p 0.1 --repetition-penalty 1.2 --presence-penalty 0.3 "
        "--frequency-penalty -0.4 --logit-bias 5=-2.5 --logit-bias 7=1 --bad-word x "
        "--bad-word-token-ids 4,5 --bad-word-token-ids 6 --stop-token-id 9 --stop-token-id 8 "
        "--no-skip-special-tokens --logprobs 3 --prompt-logprobs 0 --format json"
    )
    run("hello", *flags.split())
    assert FakeLLM.made[0].params == SamplingParams(
        n=2,
        max_tokens=256,
        temperature=0,
        min_tokens=1,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias={5: -2.5, 7: 1},
        bad_words=("x",),
        bad_words_token_ids=((4, 5), (6,)),
        stop_token_ids=(9, 8),
        skip_special_tokens=False,
        logprobs=3,
        prompt_logprobs=0,
    )


def test_every_field_of_the_sampling_parameters_has_a_flag_with_its_default() -> None:
    assert list(sampling_flags._FLAGS) == [field.name for field in fields(SamplingParams)]
    run("hello")
    expected = SamplingParams(max_tokens=256, temperature=0)
    assert FakeLLM.made[0].params == expected


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("-n", "0"),
        ("--min-tokens", "300"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--presence-penalty", "3"),
        ("--frequency-penalty", "-3"),
        ("--logit-bias", "5"),
        ("--logit-bias", "x=1"),
        ("--logit-bias", "5=inf"),
        ("--bad-word", ""),
        ("--bad-word-token-ids", "4,x"),
        ("--bad-word-token-ids", ""),
        ("--stop-token-id", "x"),
        ("--logprobs", "-1"),
        ("--prompt-logprobs", "1"),
        ("--logprobs", "1"),
        ("--max-tokens", "0"),
        ("--max-tokens", "x"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "hot"),
        ("--top-k", "-2"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--seed", "x"),
        ("--seed", str(2**64)),
        ("--stop", ""),
        ("--format", "table"),
    ],
)
def test_a_wrong_sampling_flag_is_named(flag, value) -> None:
    assert flag in run("hello", flag, value, code=2).stderr
    assert FakeLLM.made == []


def test_a_configuration_that_cannot_be_served_loads_nothing() -> None:
    result = run("hello", "--runner", "v9", "--block-size", "no", code=2)
    assert "--block-size" in result.stderr
    assert result.stdout == ""
    assert FakeLLM.made == []


def test_settings_reach_the_engine() -> None:
    run("hello", "--block-size", "32", "--no-enable-prefix-caching", "-p", "no:pcp")
    config = FakeLLM.made[0].resolved.config
    assert config.cache.block_size == 32
    assert config.cache.enable_prefix_caching is False
    assert config.plugins.plugins == ("no:pcp",)
    assert config.where("block_size") == "--block-size"


def test_json_holds_the_answer_with_its_tokens() -> None:
    record = json.loads(run("hello", "--format", "json", "--stats").stdout)
    assert record["text"] == "Grüß dich"
    assert record["token_ids"] == [7, 8]
    assert record["finish_reason"] == "length"
    assert record["runner"] == "v2"
    assert record["stats"]["num_generated_tokens"] == 2


def test_several_answers_come_one_after_the_other() -> None:
    result = run("hello", "-n", "3")
    assert result.stdout == (
        "--- 1 of 3 ---\nGrüß dich\n\n--- 2 of 3 ---\nGrüß 1dich1\n\n--- 3 of 3 ---\nGrüß 2dich2\n"
    )
    assert result.stderr.count("cut short") == 1


def test_json_lists_several_answers_and_carries_log_probabilities() -> None:
    record = json.loads(run("hello", "--format", "json", "-n", "2", "--logprobs", "1").stdout)
    assert [one["text"] for one in record["outputs"]] == ["Grüß dich", "Grüß 1dich1"]
    assert "text" not in record
    assert record["outputs"][1]["logprobs"] == [
        [
            {"token_id": 7, "logprob": -0.5, "rank": 2, "token": "a"},
            {"token_id": 9, "logprob": None, "rank": 1, "token": "b"},
        ]
    ]
    record = json.loads(run("hello", "--format", "json", "--prompt-logprobs", "0").stdout)
    assert record["prompt_logprobs"][0] is None
    assert record["prompt_logprobs"][1][0]["token_id"] == 3
    assert "logprobs" not in record
    assert record["num_cached_tokens"] == 4


def test_what_only_the_model_can_refuse_is_named_by_its_flag(monkeypatch) -> None:
    unknown = UserError("stop_token_ids has the token id 9", setting="stop_token_ids")
    monkeypatch.setattr(FakeLLM, "fails", unknown)
    assert "--stop-token-id has" in run("hello", "--stop-token-id", "9", code=2).stderr


def test_stats_go_to_stderr() -> None:
    result = run("hello", "--stats")
    assert result.stdout == "Grüß dich\n"
    assert "8.0 tokens/s" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PromptError("the prompt is too long", remedy="shorten it"), 2),
        (ModelError("the file is cut off"), 2),
        (RuntimeError("shapes differ"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_what_the_engine_raises_becomes_an_exit_code(error, code, monkeypatch) -> None:
    monkeypatch.setattr(FakeLLM, "fails", error)
    result = run("hello", code=code)
    assert str(error) in result.stderr
    assert "Traceback" not in result.stderr
    assert FakeLLM.made[0].closed
