"""Ranks as Ray actors on a real local cluster: the same tokens, and nothing left behind."""

import os
import signal
import socket
import time
from types import SimpleNamespace

import psutil
import pytest
import ray

from ranks_suite import TIGHT, check_requests, random_requests
from runnerctl import LLM, PluginError, SamplingParams, UserError, WorkerError, hookimpl
from runnerctl.executor import ray as executor
from runnerctl.resolve import resolve
from runnerctl.testing.parity import greedy, make_prompts, reference_tokens

SOON_S = 30
ON_RAY = {"distributed_executor_backend": "ray", "dtype": "float32", "enforce_eager": True}
TWO = {**ON_RAY, "prefill_context_parallel_size": 2}
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


@pytest.fixture(scope="module")
def cluster():
    """A cluster that this process is in already, as a user's own program might be."""
    ray.init(address="local", num_cpus=4, **QUIET)
    yield
    ray.shutdown()


def pids_of(llm):
    return [actor.where.pid for actor in llm._engine._executor._ranks._actors]


def assert_nothing_is_left(pids):
    """No actor's process, and no room that is kept for one."""
    deadline = time.monotonic() + SOON_S
    while any(psutil.pid_exists(pid) for pid in pids) or placed():
        assert time.monotonic() < deadline, (pids, placed())
        time.sleep(0.1)
    assert ray.is_initialized()


def placed():
    table = ray.util.placement_group_table()
    return [group for group in table.values() if group["state"] != "REMOVED"]


@pytest.mark.parametrize(
    ("family", "runner", "tp", "pcp"),
    [
        ("llama", "v1", 1, 1),
        ("llama", "v2", 1, 2),
        ("llama", "v1", 2, 1),
        ("deepseek_v2", "v2", 2, 2),
    ],
)
def test_random_requests(cluster, tiny_folders, family, runner, tp, pcp):
    """One rank; prefills shared, weights shared, and both with latent attention."""
    sizes = {"tensor_parallel_size": tp, "prefill_context_parallel_size": pcp}
    with LLM(tiny_folders(family), runner=runner, **{**TIGHT, **ON_RAY, **sizes}) as llm:
        pids = pids_of(llm)
        assert len(set(pids) | {os.getpid()}) == tp * pcp + 1
        check_requests(llm, tiny_folders(family), random_requests(40))
    assert_nothing_is_left(pids)


def test_two_engines_share_a_cluster(cluster, tiny_folders):
    prompt = make_prompts([12])[0]
    with LLM(tiny_folders("llama"), **ON_RAY) as one, LLM(tiny_folders("llama"), **ON_RAY) as other:
        said = [llm.generate([prompt], greedy())[0].outputs[0].token_ids for llm in (one, other)]
    expected = reference_tokens(tiny_folders("llama"), prompt, greedy())[0]
    assert [list(tokens) for tokens in said] == [expected, expected]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_actor_that_is_killed_or_stuck_ends_all(cluster, tiny_folders, rank, how):
    with LLM(tiny_folders("llama"), worker_timeout=4, **TWO) as llm:
        pids = pids_of(llm)
        stream = llm.stream(
            make_prompts([9]), SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        )
        next(stream)
        os.kill(pids[rank], how)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=rf"rank \d \(process \d+ on {socket.gethostname()}"):
            list(stream)
        assert time.monotonic() - started < SOON_S
        assert_nothing_is_left(pids)
        with pytest.raises(WorkerError):
            llm.generate(make_prompts([3]), greedy())


def test_a_plugin_that_the_actors_lack_names_both_sides_and_the_machine(cluster, tiny_folders):
    class Policy:
        @hookimpl
        def select_runner(self, config):
            return None

    resolved = resolve(tiny_folders("llama"), **ON_RAY)
    resolved.host.register(Policy(), name="mine")
    again = resolve(tiny_folders("llama"), host=resolved.host, **ON_RAY)
    with pytest.raises(PluginError) as caught:
        LLM.from_resolved(again)
    assert f"rank 0 on {socket.gethostname()}" in str(caught.value)
    assert "'mine' was active" in str(caught.value)
    assert_nothing_is_left([])


def test_more_ranks_than_the_cluster_has_room_for_are_refused(cluster, tiny_folders):
    with pytest.raises(UserError) as caught:
        LLM(tiny_folders("llama"), **{**TWO, "prefill_context_parallel_size": 16})
    said = str(caught.value)
    assert "16 ranks (tensor parallel 1 x prefill context parallel 16)" in said
    assert "the Ray cluster has 4 CPUs" in said
    assert_nothing_is_left([])


def test_a_cluster_that_is_full_is_an_error_and_no_wait(cluster, tiny_folders, monkeypatch):
    monkeypatch.setattr(executor, "_PLACEMENT_S", 1)
    full = ray.util.placement_group([{"CPU": 1}] * 3)
    assert full.wait(10)
    try:
        with pytest.raises(UserError, match="could not place 2 ranks within 1 seconds: 1 CPU are"):
            LLM(tiny_folders("llama"), **TWO)
    finally:
        ray.util.remove_placement_group(full)
    assert_nothing_is_left([])


def test_without_ray_it_is_said_how_to_get_it(tiny_folders, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(executor, "import_module", missing)
    with pytest.raises(UserError, match=r"runnerctl\[ray\]") as caught:
        LLM(tiny_folders("llama"), **ON_RAY)
    assert caught.value.setting == "distributed_executor_backend="


def test_an_address_where_nothing_is_says_so(tiny_folders, monkeypatch):
    def refuse(**_):
        raise ConnectionError("nobody there")

    nobody = SimpleNamespace(init=refuse, is_initialized=lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.77:1")
    with pytest.raises(UserError, match=r"no Ray cluster at 192\.0\.2\.77:1") as caught:
        executor._Cluster(nobody, 1)
    assert caught.value.setting == "RAY_ADDRESS"
