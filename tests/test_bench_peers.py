"""`benchmarks/bench_peers.py`: what it makes of the times, with contenders that only pretend."""

import importlib.util
import json
import signal
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


def test_one_that_ends_is_left_out_keeps_its_results_and_its_last_words_are_shown(
    peers, contender, capsys
):
    other = peers.Contender("runnerctl v2", [sys.executable, "-c", ANSWERS.replace("13", "99")])
    both = [contender, other]
    try:
        peers.start_all(both)
        for title, new_tokens in (("a", 4), ("b", 13), ("c", 4)):
            peers.measure(both, peers.Workload(title, [3], new_tokens), repeats=2)
    finally:
        other.stop()
    assert "cannot count so far" in capsys.readouterr().err
    rows = [(row["workload"], row["contender"]) for row in peers.table(both)]
    assert rows == [
        ("a", "runnerctl v1"),
        ("a", "runnerctl v2"),
        ("b", "runnerctl v2"),
        ("c", "runnerctl v2"),
    ]


def test_a_cold_start_that_fails_is_not_tried_again_and_stops_nobody(peers, contender, capsys):
    broken = peers.Contender("runnerctl v2", [sys.executable, "-c", "raise SystemExit('no v2')"])
    peers.measure_cold_start([broken, contender], repeats=2)
    assert broken.rates == {}
    assert len(contender.rates["e: cold start"]) == 2
    assert capsys.readouterr().err.count("no v2") == 1


@pytest.fixture
def run_main(peers, contender, monkeypatch, tmp_path):
    """`main` with the contender that pretends, and the rows of its JSON."""

    def run(measured):
        path = tmp_path / "found.json"
        words = ["bench_peers.py", "--workloads", "a,b", "--json", str(path)]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr("runnerctl.models.store.ensure_local", lambda _: tmp_path)
        monkeypatch.setattr(peers, "commands", lambda *_: [contender])
        monkeypatch.setattr(peers, "measure", measured)
        try:
            status = peers.main()
        except SystemExit as ended:
            status = ended.code
        return status, json.loads(path.read_text())["rows"]

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_cut_short_it_shows_what_was_measured(peers, contender, run_main, capsys):
    real = peers.measure

    def cut_short(contenders, work, repeats):
        if work.title.startswith("b"):
            sys.exit(143)
        real(contenders, work, repeats)

    status, rows = run_main(cut_short)
    assert status == 143
    assert [row["workload"] for row in rows] == ["a: 1 stream"]
    assert "| a: 1 stream | runnerctl v1 |" in capsys.readouterr().out
    assert contender.process is None


def test_a_run_that_measured_nothing_has_failed(run_main):
    assert run_main(lambda *_: None) == (1, [])


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
