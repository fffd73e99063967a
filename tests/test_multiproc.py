"""Ranks in processes: they start anywhere, agree on the plugins, and never outlive their engine."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch

from ranks_suite import workers_of
from runnerctl import (
    LLM,
    ModelError,
    PluginError,
    SamplingParams,
    UserError,
    WorkerError,
    decide,
    hookimpl,
)
from runnerctl.decision import PluginRecord
from runnerctl.executor.capacity import check_ranks_fit_machine
from runnerctl.executor.group import GroupExecutor
from runnerctl.executor.worker import Worker, WorkerStart, plugin_differences
from runnerctl.hookspecs import ENTRY_POINT_GROUP
from runnerctl.parallel import Place
from runnerctl.resolve import resolve
from runnerctl.runner.step import StepPlan, StepResult
from runnerctl.testing.parity import greedy, make_prompts, reference_tokens
from tiny_models import make_tiny_model

SOON_S = 30
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
OPTIONS = {"dtype": "float32", "enforce_eager": True, "worker_timeout": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(pids):
    deadline = time.monotonic() + SOON_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"of {pids} some are still there"
        time.sleep(0.05)


def two_ranks(folder, **settings):
    return LLM(folder, prefill_context_parallel_size=2, **{**OPTIONS, **settings})


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_one_rank_in_a_process_of_its_own_says_the_same(folder, runner):
    prompts = make_prompts([1, 7, 30])
    with LLM(folder, runner=runner, distributed_executor_backend="mp", **OPTIONS) as llm:
        outputs = llm.generate(prompts, greedy())
        pids = workers_of(llm)
        assert len(pids) == 1
        assert pids[0] != os.getpid()
    assert_gone(pids)
    expected = [reference_tokens(folder, prompt, greedy())[0] for prompt in prompts]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_two_engines_live_side_by_side(folder):
    with two_ranks(folder) as one, two_ranks(folder) as other:
        streams = [llm.stream(make_prompts([9]), greedy()) for llm in (one, other)]
        said = list(zip(*streams, strict=True))  # a step of one, then a step of the other
    expected = reference_tokens(folder, make_prompts([9])[0], greedy())[0]
    for deltas in zip(*said, strict=True):
        assert [token for delta in deltas for token in delta.token_ids] == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_killed_ends_the_requests_and_the_other_workers(folder, rank):
    with two_ranks(folder) as llm:
        pids = workers_of(llm)
        stream = llm.stream(make_prompts([9]), LONG)
        next(stream)
        os.kill(pids[rank], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=rf"rank {rank} \(process {pids[rank]}\)") as caught:
            list(stream)
        assert time.monotonic() - started < SOON_S
        assert "SIGKILL" in str(caught.value)
        assert_gone(pids)
        with pytest.raises(WorkerError, match="SIGKILL"):  # it stays so, and says so
            llm.generate(make_prompts([3]), greedy())


def test_a_worker_that_was_killed_while_idle_is_noticed_at_the_next_request(folder):
    with two_ranks(folder) as llm:
        pids = workers_of(llm)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1"):
            llm.generate(make_prompts([3]), greedy())
        assert_gone(pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_stopped_is_given_up(folder, rank):
    with two_ranks(folder, worker_timeout=3) as llm:
        pids = workers_of(llm)
        stream = llm.stream(make_prompts([9]), LONG)
        next(stream)
        os.kill(pids[rank], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"rank \d"):
            list(stream)
        assert_gone(pids)


def test_a_worker_that_does_not_read_is_given_up_while_a_long_prompt_is_sent(folder):
    """Its socket is full then: the message waits, and not for ever."""
    with two_ranks(folder, worker_timeout=2) as llm:
        pids = workers_of(llm)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"rank 1 .* does not take any messages"):
            llm._engine._executor._ranks.send("no such method", "x" * 5_000_000)
    assert_gone(pids)


def test_an_interrupted_engine_goes_on_with_its_workers(folder, monkeypatch):
    with two_ranks(folder) as llm:
        stream = llm.stream(make_prompts([9]), LONG)
        next(stream)
        ranks = llm._engine._executor._ranks
        receive = ranks.receive

        def interrupted():
            monkeypatch.setattr(ranks, "receive", receive)
            raise KeyboardInterrupt

        monkeypatch.setattr(ranks, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        prompt = make_prompts([12])[0]
        (output,) = llm.generate([prompt], greedy())
        assert list(output.outputs[0].token_ids) == reference_tokens(folder, prompt, greedy())[0]


# ---- as programs


SCRIPT = """
import sys
from runnerctl import LLM, SamplingParams
llm = LLM({folder!r}, prefill_context_parallel_size=2, dtype="float32", enforce_eager=True)
pids = [worker._process.pid for worker in llm._engine._executor._ranks._workers]
print("workers", *pids, flush=True)
{then}
"""
FOREVER = "while True: llm.generate([[5, 6, 7]], SamplingParams(max_tokens=50, ignore_eos=True))"


def start_script(tmp_path, folder, then):
    """A script without any `if __name__ == "__main__"`, and its workers' process ids."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(folder=str(folder), then=then))
    child = subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said = child.stdout.readline().split()
    assert said[:1] == ["workers"], child.communicate()[1]
    return child, [int(word) for word in said[1:]]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_worker_outlives_a_program_that_is_ended(tmp_path, folder, end):
    child, pids = start_script(tmp_path, folder, FOREVER)
    child.send_signal(end)
    child.communicate(timeout=SOON_S)
    assert_gone(pids)


def test_a_program_that_never_closes_its_engine_ends_all_the_same(tmp_path, folder):
    child, pids = start_script(tmp_path, folder, "print('done')")
    assert child.stdout.read() == "done\n"
    child.communicate(timeout=SOON_S)
    assert child.returncode == 0
    assert_gone(pids)


# ---- what the workers are told


PLUGIN = """
import os
from runnerctl import hookimpl
{at_import}

@hookimpl
def transform_model(model, config, decision):
    {in_worker}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(at_import=..., in_worker=...)` puts a plugin where every process finds it."""

    def put(at_import="", in_worker="pass"):
        site = tmp_path / "site"
        info = site / "ranks_plugin-2.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Name: ranks-plugin\nVersion: 2.0\n")
        entry = f"[{ENTRY_POINT_GROUP}]\nranks = ranks_plugin_module\n"
        (info / "entry_points.txt").write_text(entry)
        text = PLUGIN.format(at_import=at_import, in_worker=in_worker)
        (site / "ranks_plugin_module.py").write_text(text)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "ranks_plugin_module", raising=False)

    return put


def test_a_plugin_that_fails_in_the_workers_only_stops_the_start(folder, install):
    install(at_import=f"assert os.getpid() == {os.getpid()}, 'not here'")
    with pytest.raises(PluginError) as caught:
        LLM(folder, distributed_executor_backend="mp", **OPTIONS)
    message = str(caught.value)
    assert "'ranks' was active, ranks-plugin 2.0 where the decision was made" in message
    assert "is failed, ranks-plugin 2.0 here" in message


def test_a_plugin_from_code_is_missing_in_the_workers(folder):
    class Policy:
        @hookimpl
        def select_runner(self, config):
            return None

    resolved = resolve(folder, distributed_executor_backend="mp", **OPTIONS)
    resolved.host.register(Policy(), name="mine")
    again = resolve(folder, host=resolved.host, distributed_executor_backend="mp", **OPTIONS)
    with pytest.raises(PluginError, match=r"'mine' was active.*not installed here"):
        LLM.from_resolved(again)


def test_what_an_error_says_is_not_a_difference_but_that_there_is_one_is():
    one = PluginRecord("a", "dist", "1", "failed", error="no file /tmp/x")
    other = PluginRecord("a", "dist", "1", "failed", error="no file /tmp/y")
    assert plugin_differences([one], [other]) == []
    assert plugin_differences([one], [PluginRecord("a", "dist", "1", "active")])
    assert plugin_differences([one], [PluginRecord("a", "dist", "2", "failed")])
    assert plugin_differences([one], []) == [
        "'a' was failed, dist 1 where the decision was made, and is not installed here"
    ]


BREAKS_ONE_RANK = """
    try:
        open({marker!r}, "x").close()
    except FileExistsError:
        return
    from runnerctl_runner_v2.runner import ModelRunnerV2
    step = ModelRunnerV2._step
    def broken(self, plan):
        if {when}:
            raise ArithmeticError("the sums do not add up")
        return step(self, plan)
    ModelRunnerV2._step = broken
"""


@pytest.mark.parametrize("when", ["True", "plan.step_id > 3"], ids=["warm-up", "a later step"])
def test_an_exception_in_one_rank_names_it_and_ends_all(folder, install, tmp_path, when):
    """The other rank waits for it in an exchange, and would do so for long."""
    install(in_worker=BREAKS_ONE_RANK.format(marker=str(tmp_path / "marker"), when=when))
    before = set(psutil.Process().children())
    started = time.monotonic()
    with (
        pytest.raises(WorkerError, match="ArithmeticError: the sums do not add up") as caught,
        two_ranks(folder, worker_timeout=600, max_num_batched_tokens=16) as llm,
    ):
        llm.generate(make_prompts([70]), greedy())
    assert time.monotonic() - started < 2 * SOON_S
    assert f"rank {caught.value.rank} failed" in str(caught.value)
    assert "in broken" in caught.value.details  # where it was raised
    assert set(psutil.Process().children()) <= before


def test_a_user_s_mistake_that_a_worker_finds_is_told_as_one(folder):
    before = set(psutil.Process().children())
    with pytest.raises(UserError, match="does not hold one block") as caught:
        two_ranks(folder, kv_cache_memory_bytes=10)
    assert "--kv-cache-memory-bytes" in str(caught.value) or "kv_cache_memory_bytes" in str(
        caught.value
    )
    assert set(psutil.Process().children()) <= before


def test_the_memory_and_the_cores_of_a_machine_are_shared_by_its_ranks(folder, install, tmp_path):
    note = tmp_path / "threads"
    install(in_worker=f"open('{note}', 'a').write(os.environ.get('OMP_NUM_THREADS', '?') + ' ')")
    sizes = []
    for ranks in (1, 2):
        with LLM(
            folder,
            prefill_context_parallel_size=ranks,
            distributed_executor_backend="mp",
            kv_cache_memory_bytes=None,
            max_num_seqs=100_000,
            **OPTIONS,
        ) as llm:
            sizes.append(llm.stats().num_blocks)
    assert sizes[1] < 0.7 * sizes[0]
    assert len(note.read_text().split()) >= 3


def test_the_decision_has_the_layout(folder):
    decision = decide(folder, prefill_context_parallel_size=2)
    assert decision.runner == "v2"
    assert decision.parallel.executor == "mp"
    assert decision.parallel.world_size == 2
    assert decide(folder).parallel.executor == "uni"
    assert decide(folder, distributed_executor_backend="ray").parallel.executor == "ray"


@pytest.mark.parametrize("fits", [True, False])
def test_where_there_are_gpus_every_rank_has_its_own(monkeypatch, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6 if fits else 5)
    decided = resolve(
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        tensor_parallel_size=2,
        prefill_context_parallel_size=3,
    )
    if fits:
        check_ranks_fit_machine(decided.config, decided.decision.parallel)
        return
    with pytest.raises(UserError) as caught:
        check_ranks_fit_machine(decided.config, decided.decision.parallel)
    said = str(caught.value)
    assert "tensor_parallel_size= and prefill_context_parallel_size= ask for 6 ranks" in said
    assert "(tensor parallel 2 x prefill context parallel 3)" in said
    assert "this machine has 5 GPUs" in said


def test_ranks_that_sample_different_tokens_are_an_error():
    """What they keep of their requests would differ from then on."""

    class Ranks:
        size = 2
        ended = False

        def send(self, *_):
            pass

        def receive(self):
            return [StepResult(1, {"a": 5, "b": 7}), StepResult(1, {"a": 5, "b": 8})]

        def end(self, *, kindly):
            self.ended = True

    ranks = Ranks()
    with pytest.raises(WorkerError, match="rank 1 sampled token 8 for request b where rank 0"):
        GroupExecutor(ranks).execute(StepPlan(1)).result()
    assert ranks.ended


def test_a_model_that_is_not_on_a_rank_s_machine_names_the_machine(folder, tmp_path):
    resolved = resolve(folder, **OPTIONS)
    start = WorkerStart(resolved.config, resolved.decision, tmp_path / "gone", Place(), 0, 1)
    with pytest.raises(ModelError) as caught:
        Worker(start).load()
    assert f"gone is not there on {socket.gethostname()}, where rank 0 runs" in str(caught.value)
    assert "at the same path on every machine" in str(caught.value)
