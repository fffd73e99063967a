"""Choosing by a runner's name is the count's business: no other code asks which runner it is."""

import ast
from pathlib import Path

import pytest

CORE = Path(__file__).parent.parent / "core"
FILES = sorted(CORE.rglob("*.py"))
BUILT_IN = {"v1", "v2"}


def compared_names(source):
    """Runner names that `source` compares or matches something with."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.match_case):
            for part in ast.walk(node if isinstance(node, ast.Compare) else node.pattern):
                if isinstance(part, ast.Constant) and part.value in BUILT_IN:
                    yield part.value


@pytest.mark.parametrize("path", FILES, ids=[str(f.relative_to(CORE)) for f in FILES])
def test_core_compares_nothing_with_a_runner_name(path):
    assert list(compared_names(path.read_text())) == []


def test_the_check_finds_what_it_looks_for():
    assert list(compared_names("if runner == 'v2': pass")) == ["v2"]
    assert list(compared_names("if runner in ('v1', 'x'): pass")) == ["v1"]
    assert list(compared_names("match r:\n  case 'v1': pass")) == ["v1"]
    assert list(compared_names("runner = 'v1'")) == []
