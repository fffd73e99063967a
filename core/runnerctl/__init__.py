"""runnerctl chooses, explains and runs the model runner that serves a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from runnerctl.ballots import BUILTIN, Ballot, Discourage, Forbid, Require, Vote
    from runnerctl.config import EngineConfig, FactOverrides, ModelFacts
    from runnerctl.decision import Decision
    from runnerctl.engine.llm import LLM
    from runnerctl.engine.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        RequestOutput,
        StreamDelta,
    )
    from runnerctl.engine.pooling_params import PoolingParams
    from runnerctl.engine.sampling_params import SamplingParams
    from runnerctl.errors import (
        ConfigError,
        ModelError,
        PluginError,
        PromptError,
        UserError,
        WorkerError,
    )
    from runnerctl.hookspecs import hookimpl
    from runnerctl.plugins import PluginHost
    from runnerctl.problems import Problem
    from runnerctl.resolve import decide
    from runnerctl.runner.attention.spec import AttentionBackendSpec
    from runnerctl.runner.batch_transform import BatchTransformSpec
    from runnerctl.runner.spec import RunnerSpec
    from runnerctl.runner.transforms import ModelTransform

# Where each public name lives. Importing it only when it is asked for keeps
# `import runnerctl` at a few milliseconds, and torch out of everything but LLM.
_HOME = {
    "AttentionBackendSpec": "runnerctl.runner.attention.spec",
    "BUILTIN": "runnerctl.ballots",
    "Ballot": "runnerctl.ballots",
    "BatchTransformSpec": "runnerctl.runner.batch_transform",
    "ClassificationOutput": "runnerctl.engine.outputs",
    "CompletionOutput": "runnerctl.engine.outputs",
    "ConfigError": "runnerctl.errors",
    "Decision": "runnerctl.decision",
    "Discourage": "runnerctl.ballots",
    "EmbeddingOutput": "runnerctl.engine.outputs",
    "EngineConfig": "runnerctl.config",
    "FactOverrides": "runnerctl.config",
    "Forbid": "runnerctl.ballots",
    "LLM": "runnerctl.engine.llm",
    "ModelError": "runnerctl.errors",
    "ModelFacts": "runnerctl.config",
    "ModelTransform": "runnerctl.runner.transforms",
    "PluginError": "runnerctl.errors",
    "PluginHost": "runnerctl.plugins",
    "PoolingParams": "runnerctl.engine.pooling_params",
    "Problem": "runnerctl.problems",
    "PromptError": "runnerctl.errors",
    "RequestOutput": "runnerctl.engine.outputs",
    "Require": "runnerctl.ballots",
    "RunnerSpec": "runnerctl.runner.spec",
    "SamplingParams": "runnerctl.engine.sampling_params",
    "StreamDelta": "runnerctl.engine.outputs",
    "UserError": "runnerctl.errors",
    "Vote": "runnerctl.ballots",
    "WorkerError": "runnerctl.errors",
    "decide": "runnerctl.resolve",
    "hookimpl": "runnerctl.hookspecs",
}

__all__ = [
    "BUILTIN",
    "LLM",
    "AttentionBackendSpec",
    "Ballot",
    "BatchTransformSpec",
    "ClassificationOutput",
    "CompletionOutput",
    "ConfigError",
    "Decision",
    "Discourage",
    "EmbeddingOutput",
    "EngineConfig",
    "FactOverrides",
    "Forbid",
    "ModelError",
    "ModelFacts",
    "ModelTransform",
    "PluginError",
    "PluginHost",
    "PoolingParams",
    "Problem",
    "PromptError",
    "RequestOutput",
    "Require",
    "RunnerSpec",
    "SamplingParams",
    "StreamDelta",
    "UserError",
    "Vote",
    "WorkerError",
    "__version__",
    "decide",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'runnerctl' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
