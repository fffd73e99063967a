"""`runnerctl bench` on a tiny model: counts, numbers that fit each other, and what is refused."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from runnerctl.cli import bench_measure, bench_report
from runnerctl.cli.app import app
from runnerctl.cli.bench_measure import percentiles, run_rounds, spread
from runnerctl.cli.bench_work import Workload, synthetic
from runnerctl.engine.outputs import StreamDelta
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.engine.stats import EngineStats
from tiny_models import make_tiny_model

QUICK = ("--enforce-eager", "--repeats", "2", "--warmup", "0", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("bench") / "tiny-llama")


def run(model, *words, code=0, stdin=None):
    arguments = ["bench", *words, "--model", str(model), *QUICK]
    result = CliRunner().invoke(app, arguments, input=stdin)
    assert result.exit_code == code, result.output
    return result


def record(model, *words, **options):
    return json.loads(run(model, *words, "--format", "json", **options).stdout)


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_every_prompt_is_answered_in_full_in_every_round(model, mode):
    words = ("--num-prompts", "5", "--prompt-tokens", "3-9", "--max-tokens", "4")
    found = record(model, mode, *words)
    work = found["workload"]
    assert (work["num_prompts"], work["num_generated_tokens"]) == (5, 20)
    assert 15 <= work["num_prompt_tokens"] <= 45
    assert work["num_cached_tokens"] == 0
    assert (work["repeats"], work["warmup"], len(found["round_s"])) == (2, 0, 2)
    rates = sorted(20 / seconds for seconds in found["round_s"])
    speed = found["tokens_per_second"]
    assert [speed["min"], speed["max"]] == pytest.approx(rates)
    assert speed["min"] <= speed["median"] <= speed["max"]
    for name in ("time_to_first_token_s", "time_per_output_token_s", "latency_s"):
        times = found[name]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert found["latency_s"]["p99"] <= max(found["round_s"])
    assert (found["runner"], found["attention_backend"], found["dtype"]) == (
        "v2",
        "sdpa",
        "float32",
    )


def test_prefill_generates_one_token_for_each_prompt(model):
    found = record(model, "prefill", "--num-prompts", "3", "--prompt-tokens", "20")
    work = found["workload"]
    assert (work["num_prompt_tokens"], work["num_generated_tokens"]) == (60, 3)
    assert found["prefill_tokens_per_second"]["min"] > 0
    assert found["time_per_output_token_s"] is None


def test_the_same_seed_asks_the_same_and_a_prefix_cache_is_used_if_it_is_wanted(model):
    words = ("--num-prompts", "2", "--prompt-tokens", "40", "--max-tokens", "1")
    found = record(model, *words, "--enable-prefix-caching")
    # the second round finds what the first has computed, but for the last block
    assert found["workload"]["num_cached_tokens"] > 40


@pytest.mark.parametrize("where", ["file", "variable"])
def test_a_file_or_a_variable_turns_the_cache_on_as_well(model, where, tmp_path, monkeypatch):
    words = ["--num-prompts", "2", "--prompt-tokens", "40", "--max-tokens", "1"]
    if where == "file":
        path = tmp_path / "settings.yaml"
        path.write_text("enable-prefix-caching: true\n")
        words += ["--config", str(path)]
    else:
        monkeypatch.setenv("RUNNERCTL_ENABLE_PREFIX_CACHING", "true")
    found = record(model, *words)
    assert found["prefix_caching"] is True
    assert found["workload"]["num_cached_tokens"] == 64


def test_an_end_token_ends_nothing(model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [5, 6], "logit_bias": {"2": 1e4}}))
    found = record(model, "--prompts-file", str(path), "--max-tokens", "6")
    assert found["workload"]["num_generated_tokens"] == 6


def test_prefill_takes_one_token_of_lines_that_want_more(model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [5, 6], "max_tokens": 9, "min_tokens": 4}))
    assert record(model, "prefill", "--prompts-file", str(path))["workload"] == {
        "source": str(path),
        "seed": None,
        "num_prompts": 1,
        "num_prompt_tokens": 2,
        "num_cached_tokens": 0,
        "num_generated_tokens": 1,
        "repeats": 2,
        "warmup": 0,
    }


def test_the_setting_has_the_type_that_the_engine_computes_in():
    config = SimpleNamespace(
        model=SimpleNamespace(model="nowhere", dtype="auto"),
        cache=SimpleNamespace(block_size=16, enable_prefix_caching=False),
        runner=SimpleNamespace(enforce_eager=True),
    )
    resolved = SimpleNamespace(config=config, decision=SimpleNamespace(runner="v1"))
    llm = SimpleNamespace(stats=lambda: EngineStats(dtype="bfloat16"))
    assert bench_report.setting_of(llm, resolved)["dtype"] == "bfloat16"


def test_prompts_of_a_file_keep_their_own_parameters(model, tmp_path):
    lines = [{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}, {"prompt_token_ids": [9] * 8}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    work = record(model, "--prompts-file", str(path), "--max-tokens", "5")["workload"]
    assert work["source"] == str(path)
    assert (work["num_prompts"], work["num_prompt_tokens"]) == (2, 11)
    assert work["num_generated_tokens"] == 7


def test_the_table_for_a_person(model):
    words = ("--num-prompts", "2", "--prompt-tokens", "4", "--max-tokens", "3", "--runner", "v1")
    result = run(model, *words)
    assert "2 prompts (random tokens, seed 0), 8 tokens; 6 generated" in result.stdout
    assert "v1, eager, attention sdpa" in result.stdout
    for row in ("generated", "prefill", "time to first token", "time per output token"):
        assert row in result.stdout
    assert "round 2 of 2" in result.stderr


@pytest.mark.parametrize(
    ("words", "setting", "says"),
    [
        (("--prompt-tokens", "9-3"), "--prompt-tokens", "9-3"),
        (("--prompt-tokens", "many"), "--prompt-tokens", "16-256"),
        (("--prompt-tokens", "5000"), "--prompt-tokens", "5064"),
        (("prefill", "--max-tokens", "2"), "--max-tokens", "one token"),
        (("--prompts-file", "p.jsonl", "--seed", "3"), "--seed", "its own"),
        (("--prompts-file", "p.jsonl", "--num-prompts", "3"), "--num-prompts", "its own"),
        (("--runner", "v3"), "--runner", "v3"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(model, words, setting, says):
    result = run(model, *words, code=2)
    assert setting in result.stderr
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_numbers_over_rounds_and_answers():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert spread([]) is None
    found = percentiles([float(n) for n in range(1, 101)])
    assert (found["p50"], found["p90"], found["p99"], found["mean"]) == (50, 90, 99, 50.5)
    assert percentiles([4.0]) == {"mean": 4.0, "p50": 4.0, "p90": 4.0, "p99": 4.0}
    assert percentiles([]) is None


class Paced:
    """Three seconds to the first token of each answer, one to each further one."""

    def __init__(self, clock):
        self.clock, self.asked = clock, []

    def stats(self):
        return EngineStats()

    def stream(self, prompts, params):
        self.asked.append(len(prompts))
        for i in range(params[0].max_tokens):
            self.clock.now += 1 if i else 3
            for index in range(len(prompts)):
                yield StreamDelta(str(index), index, "", (7,))


@pytest.mark.parametrize(("mode", "seconds"), [("throughput", 6.0), ("latency", 12.0)])
def test_times_of_an_answer_begin_when_it_is_asked_for(monkeypatch, mode, seconds):
    clock, said = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(bench_measure, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    llm, params = Paced(clock), SamplingParams(temperature=0, max_tokens=4)
    work = Workload(mode, 2, (5, 5), 4, 0)
    [one] = run_rounds(
        llm, [([1], params), ([2], params)], work, repeats=1, warmup=2, say=said.append
    )
    assert llm.asked == ([2] * 3 if mode == "throughput" else [1] * 6)
    assert (one.seconds, one.generated_tokens) == (seconds, 8)
    assert one.time_to_first_token_s == [3.0, 3.0]
    assert one.time_per_output_token_s == [1.0, 1.0]
    assert one.latency_s == [6.0, 6.0]
    names = [line.split(":")[0] for line in said]
    assert names == ["warm-up 1 of 2", "warm-up 2 of 2", "round 1 of 1"]


def test_the_seed_is_that_of_lengths_and_tokens():
    def prompts(seed):
        made = synthetic(Workload("throughput", 20, (5, 50), 4, seed), vocab_size=50)
        return [one["prompt_token_ids"] for one in made]

    assert prompts(1) == prompts(1) != prompts(2)
    assert len({len(one) for one in prompts(1)}) > 5
    assert {token for one in prompts(1) for token in one} == set(range(50))
