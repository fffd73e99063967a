"""Programs whose engine runs on Ray, each with the cluster that it finds or starts."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from runnerctl.testing.parity import greedy, reference_tokens
from tiny_models import make_tiny_model

SOON_S = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


SCRIPT = """
import sys
import psutil
from runnerctl import LLM, SamplingParams
settings = dict(distributed_executor_backend="ray", dtype="float32", enforce_eager=True)
open_engine = lambda: LLM({folder!r}, **settings)
llm = open_engine()
print("ready", *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
{then}
"""
GENERATE = "print(*llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5))"
TOKENS = GENERATE + "[0].outputs[0].token_ids)"
AGAIN = "llm.close()\nllm = open_engine()\n" + TOKENS + "\nllm.close()"
FOREVER = "while True: llm.generate([[5, 6, 7]], SamplingParams(max_tokens=50, ignore_eos=True))"


def start_script(tmp_path, folder, then, **environment):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(folder=str(folder), then=then))
    clean = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    child = subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, **environment},
    )
    said = child.stdout.readline().split()
    assert said[:1] == ["ready"], child.communicate()[1]
    return child, [int(word) for word in said[1:]]


def assert_gone(pids):
    deadline = time.monotonic() + SOON_S
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("then", "end"),
    [(AGAIN, None), ("print('left')", None), (FOREVER, "SIGINT")],
    ids=["closed and opened again", "never closed", "Ctrl-C"],
)
def test_a_cluster_that_was_started_for_an_engine_ends_with_it(tmp_path, folder, then, end):
    child, pids = start_script(tmp_path, folder, then)
    assert len(pids) > 2  # Ray's own, and the actor
    if end:
        child.send_signal(getattr(signal, end))
    _, errors = child.communicate(timeout=2 * SOON_S)
    assert end or child.returncode == 0, errors
    assert_gone(pids)


def test_a_cluster_that_was_started_before_is_used_and_left_running(tmp_path, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
    head = subprocess.Popen(
        [*command, "--disable-usage-stats", f"--temp-dir={tempfile.mkdtemp()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in head.stdout:
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail("ray start ended")
        # a cluster on this machine is found, and so is its token; elsewhere both are named
        address = {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_AUTH_MODE": "token"}
        child, _ = start_script(tmp_path, folder, TOKENS, **address)
        output, errors = child.communicate(timeout=2 * SOON_S)
        assert child.returncode == 0, errors
        expected = reference_tokens(folder, [5, 6, 7], greedy(5))[0]
        assert [int(word) for word in output.split()] == expected
        assert head.poll() is None
        again, _ = start_script(tmp_path, folder, "print('again')")
        again.communicate(timeout=2 * SOON_S)
        assert again.returncode == 0
    finally:
        family = [head, *psutil.Process(head.pid).children(recursive=True)]
        head.terminate()
        head.wait(timeout=SOON_S)
        assert_gone([member.pid for member in family[1:]])
