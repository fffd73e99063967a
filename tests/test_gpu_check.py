"""The script for a GPU runs through here, on a CPU and small shapes, and tells a failure."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_a_section_that_fails_is_shown_and_the_others_go_on(monkeypatch, capsys):
    module = load()

    def broken(device, quick):
        raise RuntimeError("no such kernel")

    sections = {"first": broken, "second": lambda device, quick: [("second", "ok", "")]}
    monkeypatch.setattr(module, "SECTIONS", sections)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--sections", "first,second"])
    assert module.main() == 1
    shown = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in shown
    assert "second" in shown
