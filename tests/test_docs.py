"""What the documentation shows is what happens: Python runs, commands print what is shown."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [
        pytest.param(
            match.group(2), id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}"
        )
        for page in PAGES
        for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if match.group(1) == language
    ]


def environment():
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_")
        and (not name.startswith("RUNNERCTL_") or name == "RUNNERCTL_CACHE_DIR")
    } | {"COLUMNS": "80", "NO_COLOR": "1"}


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, smollm2):
    ran = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment(), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def commands(block):
    """(command, expected output) for each `$ ` line of a console block."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


@pytest.mark.parametrize("block", blocks("console"))
def test_commands_print_what_is_shown(block, smollm2):
    shown = list(commands(block))
    assert shown
    for command, expected in shown:
        program, *arguments = shlex.split(command)
        assert program == "runnerctl"
        ran = subprocess.run(
            [sys.executable, "-m", "runnerctl", *arguments],
            check=False,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        pattern = re.escape(expected).replace(re.escape("...\n"), r"(?:.*\n)*")
        assert re.fullmatch(pattern, ran.stdout), ran.stdout + ran.stderr


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
