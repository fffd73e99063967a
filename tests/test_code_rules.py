"""Rules that the code keeps as a whole, and that a reader may rely on."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from runnerctl import hookspecs

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("core/**/*.py"), *ROOT.glob("plugins/**/*.py")])
HOOKS = {
    name: function
    for name, function in vars(hookspecs).items()
    if hasattr(function, f"{hookspecs.PROJECT}_spec")
}
# Decoding by somebody else: transformers' loop, or its caches.
FOREIGN_DECODING = re.compile(
    r"\b(model|_model|module)\.generate\(|GenerationMixin|GenerationConfig\b.*generate"
    r"|cache_utils|\b(Dynamic|Static|Hybrid|Quantized|Sliding\w*|Offloaded)Cache\b"
)
# Where that is what the file is for: layers of transformers' cache that hold a request's recurrent
# state and no keys, and the way out for models that cannot be paged.
MAY_USE_FOREIGN_CACHES = {"recurrent_state.py", "recurrent_model.py", "own_cache.py"}


def test_there_are_sources():
    assert len(SOURCES) > 50


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_decodes_through_transformers_loop_or_caches(path):
    if "testing" in path.parts or path.name in MAY_USE_FOREIGN_CACHES:
        return  # the kit compares with transformers' own loop: that is its oracle
    found = FOREIGN_DECODING.findall(path.read_text(encoding="utf-8"))
    assert not found


def test_the_rule_about_foreign_decoding_bites():
    for line in (
        "out = self._model.generate(ids)",
        "from transformers.cache_utils import Cache",
        "cache = DynamicCache(config=config)",
    ):
        assert FOREIGN_DECODING.search(line)
    assert not FOREIGN_DECODING.search("return self.generate(prompts)")


def test_no_caller_asks_a_model_to_keep_its_own_cache():
    (call,) = [
        keyword.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "use_cache"
    ]
    assert call.value is False


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small_enough_to_read_in_one_sitting(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno - node.lineno + 1 - _docstring_lines(node) > 60
    ]
    assert not long


def _docstring_lines(node):
    first = node.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.end_lineno - first.lineno + 1 if is_docstring else 0


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_says_when_it_is_called_what_it_returns_and_shows_an_example(name):
    text = inspect.getdoc(HOOKS[name])
    assert re.search(r"^Called once", text, re.MULTILINE)
    assert "in the process" in text or "right after all plugins are loaded" in text
    for heading in ("Returns:", "Example:"):
        assert re.search(rf"^{heading}$", text, re.MULTILINE)
    arguments = inspect.signature(HOOKS[name]).parameters
    assert all(re.search(rf"^\s+{argument}: ", text, re.MULTILINE) for argument in arguments)


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_has_a_page_in_the_guide_and_a_test(name):
    assert f"`{name}`" in (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    tests = [path for path in ROOT.glob("tests/test_*.py") if path != Path(__file__)]
    assert any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in tests)


def test_the_plugins_are_found_like_anyones():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    entry_points = project["project"]["entry-points"][hookspecs.ENTRY_POINT_GROUP]
    folders = {path.name for path in (ROOT / "plugins").iterdir() if path.is_dir()}
    assert set(entry_points) == folders
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(package).name for package in packages} == {*entry_points.values(), "runnerctl"}
