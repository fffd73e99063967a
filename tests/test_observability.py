"""The journal, the numbers an engine keeps, and the time of each plugin."""

import json
import logging
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from runnerctl import LLM, ConfigError, Decision, PluginHost, SamplingParams, Vote, decide, hookimpl
from runnerctl.cli.stats import stats_report
from runnerctl.engine.journal import Journal
from runnerctl.engine.stats import EngineStats
from tiny_models import make_tiny_model

REQUEST_FIELDS = {
    "event": str,
    "time": str,
    "pid": int,
    "request_id": str,
    "num_prompt_tokens": int,
    "num_cached_tokens": int,
    "num_generated_tokens": int,
    "finish_reason": str,
    "stop_reason": str | int | None,
    "error": str | None,
    "time_to_first_token_s": float | None,
    "seconds": float,
    "tokens_per_second": float,
    "num_preemptions": int,
    "seed": int,
}


def params(max_tokens=4, **changes):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, **changes)


def lines(path, event=None):
    read = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [line for line in read if event in (None, line["event"])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log.jsonl"


@pytest.fixture
def llm(folder, log):
    with LLM(folder, dtype="float32", max_model_len=64, block_size=4, log_json=log) as llm:
        yield llm


def test_the_decision_is_logged_with_all_it_has(llm, log, folder):
    (line,) = lines(log)
    assert (line.pop("event"), line.pop("pid")) == ("decision", os.getpid())
    assert line.pop("model") == str(folder)
    assert line.pop("time").endswith("+00:00")
    assert Decision.from_json(json.dumps(line)) == llm.decision


def test_a_finished_request_is_one_line_of_the_documented_fields(llm, log):
    llm.generate([[5, 6, 7], [8, 9]], params(seed=3))
    first, second = lines(log, "request")
    for line in (first, second):
        assert line.keys() == REQUEST_FIELDS.keys()
        assert all(isinstance(line[name], kind) for name, kind in REQUEST_FIELDS.items())
        assert 0 < line["time_to_first_token_s"] <= line["seconds"]
        assert line["tokens_per_second"] == pytest.approx(4 / line["seconds"], rel=0.01)
    assert [line["request_id"] for line in (first, second)] == ["0", "1"]
    assert [line["num_prompt_tokens"] for line in (first, second)] == [3, 2]
    assert first["num_generated_tokens"] == 4
    assert (first["finish_reason"], first["stop_reason"], first["error"]) == ("length", None, None)
    assert first["seed"] == 3


def test_every_answer_of_a_prompt_has_a_line_with_its_own_seed(llm, log):
    llm.generate([5, 6, 7, 8, 9], params(n=3, seed=10))
    found = {line["request_id"]: line for line in lines(log, "request")}
    assert [found[i]["seed"] for i in ("0", "0.1", "0.2")] == [10, 11, 12]
    assert [found[i]["num_cached_tokens"] for i in ("0", "0.1", "0.2")] == [0, 4, 4]


def test_an_aborted_request_is_logged_once_and_counted(llm, log):
    stream = llm.stream([[5, 6, 7], [8, 9]], params(max_tokens=30))
    first = next(stream)
    llm.abort(first.request_id)
    llm.abort(first.request_id)
    stream.close()
    found = {line["request_id"]: line for line in lines(log, "request")}
    assert sorted(found) == ["0", "1"]
    assert len(lines(log, "request")) == 2
    assert {line["finish_reason"] for line in found.values()} == {"abort"}
    assert found["0"]["num_generated_tokens"] == 1
    assert (llm.stats().num_requests, llm.stats().num_aborted) == (2, 2)


def test_a_request_without_a_token_has_no_time_to_the_first(llm, log):
    llm.stream([[5, 6, 7]], params()).close()
    (line,) = lines(log, "request")
    assert line["time_to_first_token_s"] is None
    assert (line["num_generated_tokens"], line["tokens_per_second"]) == (0, 0.0)
    assert llm.stats().num_prompt_tokens == 0


def test_a_step_that_fails_ends_every_request_with_the_errors_name(llm, log, monkeypatch):
    def fails(plan):
        raise FloatingPointError("secret words of a prompt")

    monkeypatch.setattr(llm._engine._executor, "execute", fails)
    with pytest.raises(FloatingPointError):
        llm.generate([[5, 6], [7, 8]], params(n=2))
    found = lines(log, "request")
    assert sorted(line["request_id"] for line in found) == ["0", "0.1", "1", "1.1"]
    assert {(line["finish_reason"], line["error"]) for line in found} == {
        ("abort", "FloatingPointError")
    }
    assert "secret" not in log.read_text()


def test_what_still_runs_when_the_model_is_closed_is_logged(llm, log):
    stream = llm.stream([[5, 6, 7]], params(max_tokens=30))
    next(stream)
    llm.close()
    (line,) = lines(log, "request")
    assert (line["finish_reason"], line["num_generated_tokens"]) == ("abort", 1)


def test_preemptions_are_counted_for_the_request_that_lost_its_blocks(folder, log):
    with LLM(
        folder, max_model_len=24, block_size=4, num_gpu_blocks_override=7, log_json=log
    ) as llm:
        llm.generate([[5] * 8, [6] * 8], params(max_tokens=12))
        stats = llm.stats()
    counts = {line["request_id"]: line["num_preemptions"] for line in lines(log, "request")}
    assert counts["0"] == 0
    assert counts["1"] == stats.num_preemptions > 0
    assert stats.peak_blocks_used == stats.num_blocks == 7
    assert stats.num_prefill_tokens > stats.num_prompt_tokens


def test_a_decision_that_failed_is_logged_before_it_is_raised(folder, log):
    with pytest.raises(ConfigError):
        LLM(folder, runner="v9", log_json=log)
    (line,) = lines(log)
    assert line["runner"] is None
    assert line["explicit"]["runner"] == "v9"
    assert any(p["severity"] == "error" for p in line["problems"])


def test_nothing_is_written_unless_it_is_asked_for(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    decide(folder, environ={})
    assert not list(tmp_path.iterdir())
    decide(folder, environ={"RUNNERCTL_LOG_JSON": "by_variable.jsonl"})
    assert [line["event"] for line in lines("by_variable.jsonl")] == ["decision"]
    assert capfd.readouterr() == ("", "")
    decide(folder, log_json="-")
    assert json.loads(capfd.readouterr().err)["event"] == "decision"


@pytest.mark.parametrize("place", ["no/such/folder/log", "."])
def test_a_place_one_cannot_write_to_is_an_error_before_the_model_loads(folder, tmp_path, place):
    with pytest.raises(ConfigError) as caught:
        LLM(folder, log_json=tmp_path / place)
    (problem,) = caught.value.decision.errors
    assert str(tmp_path) in problem.message
    assert "log_json" in problem.setting
    assert "stderr" in problem.remedy


def test_a_journal_that_can_no_longer_be_written_loses_no_answer(folder, tmp_path, caplog):
    log = tmp_path / "logs" / "log.jsonl"
    log.parent.mkdir()
    with LLM(folder, log_json=log) as llm:
        log.unlink()
        log.parent.rmdir()
        with caplog.at_level(logging.WARNING):
            (output,) = llm.generate([5, 6, 7], params())
    assert output.finished
    assert "cannot append to" in caplog.text


def test_processes_that_share_a_file_do_not_mix_their_lines(tmp_path):
    log = tmp_path / "log.jsonl"
    code = (
        "from pathlib import Path\n"
        "from runnerctl import Decision\n"
        "from runnerctl.engine.journal import Journal\n"
        f"journal = Journal(Path({str(log)!r}), '--log-json')\n"
        "for _ in range(300):\n"
        "    journal.decision('m' * 9000, Decision(runner=None))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(lines(log)) == 600
    assert len({line["pid"] for line in lines(log)}) == 2


def test_a_file_that_is_there_is_added_to(tmp_path):
    log = tmp_path / "log"
    log.write_text('{"event": "older"}\n')
    Journal(log, "--log-json").decision("m", Decision(runner=None))
    assert [line["event"] for line in lines(log)] == ["older", "decision"]


def test_what_an_engine_counts(llm):
    llm.generate([5, 6, 7, 8, 9, 10, 11, 12], params(max_tokens=5))
    stats = llm.stats()
    assert stats.num_steps == 5
    assert stats.mean_batch_size == 1
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (8, 0)
    assert (stats.num_prefill_tokens, stats.num_generated_tokens) == (8, 5)
    assert stats.num_decode_tokens == 4
    assert (stats.num_blocks_used, stats.peak_blocks_used) == (0, 3)
    assert 0 < stats.prefill_time_s < stats.step_time_s

    llm.generate([[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 1]], params(max_tokens=5))
    stats = llm.stats()
    assert (stats.num_requests, stats.num_aborted, stats.num_steps) == (3, 0, 10)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (21, 8)
    assert stats.num_prefill_tokens == 8 + 4 + 1
    assert stats.cache_hit_rate == 8 / 21
    assert stats.mean_batch_size == 15 / 10
    assert stats.peak_blocks_used > 3


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_type_it_computes_in_is_that_of_the_loaded_model(folder, runner):
    settings = {"runner": runner, "enforce_eager": True, "max_model_len": 32}
    for asked, found in (("bfloat16", "bfloat16"), ("auto", "float32")):
        with LLM(folder, dtype=asked, **settings) as llm:
            assert llm.stats().dtype == found


def test_a_prompt_cut_in_chunks_is_counted_as_prefill_even_in_chunks_of_one(folder):
    with LLM(folder, max_model_len=32, max_num_batched_tokens=1) as llm:
        llm.generate([5, 6, 7], params(max_tokens=3))
        stats = llm.stats()
    assert (stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_steps) == (3, 2, 5)


def test_numbers_of_an_engine_that_did_nothing():
    numbers = EngineStats().to_dict()
    assert not any(value for value in numbers.values())
    json.dumps(numbers)


def test_rates_are_over_the_time_they_belong_to():
    stats = EngineStats(
        num_generated_tokens=12, num_decode_tokens=10, num_prefill_tokens=30, num_steps=11
    )
    stats.step_time_s, stats.prefill_time_s = 6.0, 1.0
    assert stats.tokens_per_second == 2
    assert stats.prefill_tokens_per_second == 30
    assert stats.decode_tokens_per_second == 2


def test_the_table_for_people():
    stats = EngineStats(
        num_prompt_tokens=7,
        num_cached_tokens=4,
        num_generated_tokens=1,
        num_blocks=20,
        peak_blocks_used=3,
        num_preemptions=2,
        dtype="bfloat16",
        plugin_seconds={"mine": {"import": 0.001, "select_runner": 0.0005}},
    )
    console = Console(file=StringIO(), width=80)
    console.print(stats_report(stats))
    text = console.file.getvalue()
    for part in (
        "7 tokens, 4 from the cache",
        "1 token,",
        "3 of 20 blocks at most",
        "2 preemptions",
        "bfloat16",
        "mine 1.5 ms (import 1.0, select_runner 0.5)",
    ):
        assert part in text


def test_the_time_of_each_hook_is_kept_and_is_no_part_of_the_decision(folder):
    def select_runner(config):
        yield Vote("v1", "a reason")
        raise ValueError("and then it fails")

    def made():
        host = PluginHost.discover()
        host.register(SimpleNamespace(select_runner=hookimpl(select_runner)), name="slow")
        return host

    host = made()
    first = decide(folder, host=host, environ={})
    assert host.timings["slow"].keys() == {"import", "select_runner"}
    assert {"import", "register_runners", "validate_config"} == host.timings["runner_v1"].keys()
    assert all(s >= 0 for hooks in host.timings.values() for s in hooks.values())
    once = host.timings["slow"]["select_runner"]
    assert decide(folder, host=host, environ={}) == first
    assert host.timings["slow"]["select_runner"] > once
    assert decide(folder, host=made(), environ={}) == first


def test_the_time_of_plugins_is_in_the_stats(llm):
    seconds = llm.stats().plugin_seconds
    assert "import" in seconds["moe_allowlist"]
    assert "select_runner" in seconds["moe_allowlist"]
