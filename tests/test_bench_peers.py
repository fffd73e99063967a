"""`benchmarks/bench_peers.py`: what it makes of the times, with contenders that only pretend."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "benchmarks" / "bench_peers.py"
ANSWERS = """
import json, sys
print(json.dumps({"how": "pretends"}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if task["new_tokens"] == 13:
        sys.exit("cannot count so far")
    print(json.dumps({"seconds": 0.5 * len(task["prompts"])}), flush=True)
"""


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("bench_peers", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_peers"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_peers"]


@pytest.fixture
def contender(peers):
    one = peers.Contender("runnerctl v1", [sys.executable, "-c", ANSWERS])
    yield one
    one.stop()


def test_a_rate_counts_new_tokens_or_the_prompt_of_a_prefill(peers):
    assert peers.Workload("w", [10, 20], 4).rate(2.0) == 4
    assert peers.Workload("w", [10, 20], 1).rate(2.0) == 15


def test_the_warm_up_is_not_counted(peers, contender):
    contender.start()
    peers.measure([contender], peers.Workload("w", [3, 5], 4), repeats=3)
    assert contender.rates == {"w": [8.0] * 3}


def test_one_that_ends_is_left_out_and_its_last_words_are_shown(peers, contender, capsys):
    contender.start()
    others = [contender]
    peers.measure(others, peers.Workload("w", [3], 13), repeats=3)
    assert others == []
    assert contender.rates == {}
    assert "cannot count so far" in capsys.readouterr().err


def test_one_that_cannot_start_does_not_stop_the_others(peers, contender, capsys):
    absent = peers.Contender("vllm compiled", ["/nowhere/python"])
    broken = peers.Contender("runnerctl v2", [sys.executable, "-c", "raise SystemExit('no v2')"])
    assert peers.start_all([absent, broken, contender]) == [contender]
    told = capsys.readouterr().err
    assert "vllm compiled is left out" in told
    assert "no v2" in told


def test_an_interrupt_while_they_start_ends_those_that_are_up(peers, contender, monkeypatch):
    late = peers.Contender("runnerctl v2", [])
    monkeypatch.setattr(late, "start", lambda: sys.exit(143))
    with pytest.raises(SystemExit):
        peers.start_all([contender, late])
    assert contender.process is None


def test_ratios_are_of_medians_and_more_is_better_in_a_cold_start_too(peers):
    v1 = peers.Contender("runnerctl v1", [], rates={"a": [1.0, 2.0, 9.0], "e: cold start": [0.5]})
    base = peers.Contender(peers.BASE, [], rates={"a": [4.0], "e: cold start": [0.25]})
    rows = {(row["workload"], row["contender"]): row for row in peers.table([v1, base])}
    assert rows["a", "runnerctl v1"]["to_transformers"] == 0.5
    assert rows["a", peers.BASE]["to_v1"] == 2
    assert rows["a", "runnerctl v1"]["range"] == [1, 9]
    cold = rows["e: cold start", "runnerctl v1"]
    assert (cold["median"], cold["unit"], cold["to_transformers"]) == (2, "s", 2)


@pytest.mark.parametrize(
    "wrong", [["--workloads", "a,x"], ["--contenders", "runnerctl v9"], ["--repeats", "0"]]
)
def test_a_slip_in_an_option_is_told_before_anything_starts(peers, wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", *wrong])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert ended.value.code == 2
    assert repr(wrong[1].split(",")[-1]) in capsys.readouterr().err
