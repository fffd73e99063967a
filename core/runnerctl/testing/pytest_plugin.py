"""The pytest plugin that comes with runnerctl: fixtures, and nothing that acts unasked.

pytest imports this in every environment that has runnerctl, so it imports only
pytest; each fixture imports what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runnerctl.decision import Decision
    from runnerctl.plugins import PluginHost

# Failing asserts of the conformance classes then show their values, as in a test module.
pytest.register_assert_rewrite(
    *(
        f"runnerctl.testing.{name}"
        for name in (
            "attention",
            "parity",
            "policy",
            "runner",
            "runner_engine",
            "runner_lifecycle",
            "runner_pooling",
            "runner_steps",
            "scripted",
        )
    )
)


@pytest.fixture
def plugin_host() -> PluginHost:
    """A host that knows no plugin, not even the installed ones; `register` yours."""
    from runnerctl.plugins import PluginHost

    return PluginHost()


@pytest.fixture
def installed_host() -> PluginHost:
    """A host with the plugins that are installed, as a command would see them."""
    from runnerctl.plugins import PluginHost

    return PluginHost.discover()


@pytest.fixture
def decide_with() -> Callable[..., Decision]:
    """`decide_with(*plugins, model=..., runners=..., **settings)`; see `testing.decide_with`."""
    from runnerctl.testing.hosts import decide_with

    return decide_with


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_models(family)`: the folder of a tiny random checkpoint, made once per session."""
    from runnerctl.testing.tiny_models import make_tiny_model

    made: dict[str, Path] = {}

    def tiny_models(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return tiny_models


@pytest.fixture(scope="session")
def tiny_model(tiny_models: Callable[[str], Path]) -> Path:
    """The folder of a tiny random llama: float32 weights, no tokenizer."""
    return tiny_models("llama")
