"""`RunnerConformance`: a runner under plans by hand, under the real engine, and at its end."""

from __future__ import annotations

from runnerctl.testing.runner_steps import StepContract


class RunnerConformance(StepContract):
    """Subclass it in a test module, name the spec, and pytest does the rest.

    Attributes:
        spec: what the plugin's `register_runners` returns.
        settings: beyond those that the tests set, as for `LLM`.

    Example:
        class TestMine(RunnerConformance):
            spec = my_plugin.register_runners()[0]
    """
