"""What holds a plugin to its contract: classes to subclass, fixtures, tiny models.

In the test suite of a plugin:

    from runnerctl.testing import PolicyConformance

    class TestMyPolicy(PolicyConformance):
        plugin = my_policy

The fixtures (`plugin_host`, `tiny_model`, `decide_with` ...) are there wherever
runnerctl is installed. Nothing here imports torch before a test needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runnerctl.testing.attention import AttentionBackendConformance
    from runnerctl.testing.configurations import CONFIGURATIONS, Configuration
    from runnerctl.testing.hosts import decide_with, host_with
    from runnerctl.testing.policy import PolicyConformance
    from runnerctl.testing.runner import RunnerConformance
    from runnerctl.testing.tiny_models import make_tiny_model, reference_generate

_HOME = {
    "CONFIGURATIONS": "configurations",
    "AttentionBackendConformance": "attention",
    "Configuration": "configurations",
    "PolicyConformance": "policy",
    "RunnerConformance": "runner",
    "decide_with": "hosts",
    "host_with": "hosts",
    "make_tiny_model": "tiny_models",
    "reference_generate": "tiny_models",
}

__all__ = [
    "CONFIGURATIONS",
    "AttentionBackendConformance",
    "Configuration",
    "PolicyConformance",
    "RunnerConformance",
    "decide_with",
    "host_with",
    "make_tiny_model",
    "reference_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'runnerctl.testing' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"runnerctl.testing.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
