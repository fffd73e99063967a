"""`RunnerConformance`: a runner under plans by hand, under the real engine, and at its end."""

from __future__ import annotations

from runnerctl.testing.runner_engine import EngineContract
from runnerctl.testing.runner_lifecycle import LifecycleContract
from runnerctl.testing.runner_pooling import PoolingContract
from runnerctl.testing.runner_steps import StepContract


class RunnerConformance(StepContract, EngineContract, PoolingContract, LifecycleContract):
    """Subclass it in a test module, name the spec, and pytest does the rest.

    It runs tiny random models in float32, alone and against `transformers`. What the spec
    claims is held against it: `resumes_as_new`, `concurrent_batches`, each capability.

    Attributes:
        spec: what the plugin's `register_runners` returns.
        settings: beyond those that the tests set, as for `LLM`.
        plugins: modules or objects that take part: with their attention backends, their
            transformations of the model, their votes. By default none does, not even the
            runner's own. Every start of a runner applies them, so what they build counts.

    Example:
        class TestMine(RunnerConformance):
            [spec] = my_plugin.register_runners()
    """
