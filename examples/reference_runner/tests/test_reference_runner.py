"""The runner keeps the step contract, and says what transformers says."""

import reference_runner

from runnerctl.testing import PolicyConformance, RunnerConformance


class TestRunner(RunnerConformance):
    [spec] = reference_runner.register_runners()


class TestPlugin(PolicyConformance):
    plugin = reference_runner
