"""Which of V1's two runners serves a model: one steps through answers, one reads texts whole."""

from __future__ import annotations

from runnerctl.runner.protocol import ModelRunner, WorkerContext


def make_runner(context: WorkerContext) -> ModelRunner:
    """The runner for what the Decision says of the model."""
    facts = context.decision.facts
    if facts is not None and facts.runner_type == "pooling":
        from .pooling_runner import PoolingRunnerV1

        return PoolingRunnerV1(context)
    from .runner import ModelRunnerV1

    return ModelRunnerV1(context)
