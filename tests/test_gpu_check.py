"""The script for a GPU runs through here, on a CPU and small shapes, and tells a failure."""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from runnerctl.testing import parity
from tiny_models import make_tiny_model

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


def load():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs_through_on_a_cpu(tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OUT": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu_check.json").read_text())
    names = [name for name, _, _ in rows]
    assert [name for name in names if name.startswith("(")] == [
        "(machine)",
        "(backends)",
        "(parity)",
        "(speed)",
    ]
    assert {verdict for name, verdict, _ in rows if name.startswith("parity")} == {"ok"}
    assert sum(name.startswith("parity llama v2") for name in names) == 3
    decodes = [name for name in names if name.startswith("decode 2")]
    assert [name.split()[2] for name in decodes] == ["v1", "v2", "v2", "transformers"]


def test_a_section_that_fails_is_shown_and_the_others_go_on(monkeypatch, capsys, tmp_path):
    module = load()

    def broken(device, quick):
        raise RuntimeError("no such kernel")

    sections = {"first": broken, "second": lambda device, quick: [("second", "ok", "")]}
    monkeypatch.setattr(module, "SECTIONS", sections)
    words = ["--device", "cpu", "--sections", "first,second"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert module.main() == 1
    assert "second" in (tmp_path / "gpu_check.json").read_text()
    shown = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in shown
    assert "second" in shown


def test_a_backend_that_declines_everything_is_not_called_ok():
    [(title, verdict, _), (_, _, why)] = load().check_backend("t", "torch_flash", 256, False)
    assert (title, verdict) == ("t", "declined")
    assert why.startswith("declined: ")


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (0, "PASSED t.py::T::test_a_ragged_batch_equals_the_reference[x]\n1 passed", "ok"),
        (0, "PASSED t.py::T::test_it_says_what_it_declines_in_a_sentence\n1 passed", "declined"),
        (1, "PASSED t.py::T::test_head_sizes[64]\nFAILED t.py::T::test_x\n1 failed", "FAILED"),
        (1, "", "FAILED"),
    ],
)
def test_what_pytest_said_becomes_a_verdict(status, output, verdict):
    (found, summary), _ = load().verdict_of(status, output, "No module named pytest")
    assert found == verdict
    assert summary == (output.splitlines()[-1] if output else "No module named pytest")


def test_tokens_that_differ_fail_the_parity(monkeypatch, tmp_path):
    module, folder = load(), make_tiny_model("llama", tmp_path / "llama")
    settings = {"runner": "v1", "enforce_eager": True, "block_size": 16}
    assert module.compare_tokens("t", folder, settings)[0][1] == "ok"

    def shifted(folder, prompt, params):
        tokens, gaps = right(folder, prompt, params)
        return [*tokens[:-1], tokens[-1] ^ 1], [1.0] * len(gaps)

    right = parity.reference_tokens
    monkeypatch.setattr(parity, "reference_tokens", shifted)
    with pytest.raises(AssertionError, match="token 19"):
        module.compare_tokens("t", folder, settings)


def test_a_contender_that_fails_leaves_the_others_their_numbers(monkeypatch):
    module = load()

    @contextmanager
    def broken():
        raise MemoryError("too large to capture")
        yield

    @contextmanager
    def fine():
        yield lambda prompts, new_tokens: None, "; fine"

    monkeypatch.setattr(module, "contenders", lambda *_: [("v2", broken), ("v1", fine)])
    rows = module.measure_speed("cpu", quick=True)
    assert ("v2", "FAILED", "MemoryError: too large to capture") in rows
    assert [row[0] for row in rows if row[0].startswith("decode")] == [
        "decode 1: v1",
        "decode 2: v1",
    ]


def test_a_decode_step_reads_weights_and_the_cache_but_not_the_embedding(tmp_path):
    module = load()
    weights, per_token = module.make_model(tmp_path, quick=True)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert weights == 2 * (2 * layer + 64 + 64 * 256)
    assert per_token == 2 * 2 * 2 * 16 * 2
    assert module.steps_per_second(100.0, 30, 2, 10) == 2


def test_without_a_gpu_it_does_not_pretend(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as ended:
        load().main()
    assert ended.value.code == 2
    assert "no GPU is visible" in capsys.readouterr().err
