"""`runnerctl bench` on a tiny model: counts, numbers that fit each other, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from runnerctl.cli.app import app
from runnerctl.cli.bench_measure import percentiles, spread
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
