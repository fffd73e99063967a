"""The V2 runner: it provides `v2`, votes for it, and brings what makes a CPU fast.

Whether V2 *can* serve a model is not said here: the host compares what a runner offers
with what a configuration needs. Other plugins cancel this vote where V2 should not be
the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runnerctl import BUILTIN, AttentionBackendSpec, ModelTransform, RunnerSpec, Vote, hookimpl

if TYPE_CHECKING:
    from runnerctl import Decision, EngineConfig


@hookimpl
def register_runners() -> list[RunnerSpec]:
    """Provide v2."""
    return [
        RunnerSpec(
            name="v2",
            factory="runnerctl_runner_v2.runner:ModelRunnerV2",
            # Dense models and every mixture of experts that v1 can serve; which of those by
            # default is other plugins' business.
            capabilities=frozenset({"generate", "moe", "mla", "tp"}),
            resumes_as_new=True,
            concurrent_batches=2,
        )
    ]


@hookimpl
def select_runner(config: EngineConfig) -> Vote | None:
    """Vote for v2 on generate models; pooling models are left to the fallback."""
    if config.facts is None or config.facts.runner_type != "generate":
        return None
    return Vote("v2", "v2 is the default for models that generate text", BUILTIN)


@hookimpl
def register_attention_backends() -> list[AttentionBackendSpec]:
    """Provide the CPU's paged kernels."""
    return [
        AttentionBackendSpec(
            "cpu_paged",
            "runnerctl_runner_v2.cpu.backend:CpuPagedBackend",
            # After every kernel for a GPU, before core's way that runs everywhere.
            priority=-25,
            compiles=True,
        )
    ]


@hookimpl
def transform_model(
    model: Any, config: EngineConfig, decision: Decision
) -> list[ModelTransform] | None:
    """Pack linear layers and compile decoder layers, for V2 on a CPU."""
    if decision.runner != "v2" or config.runner.enforce_eager or model.device.type != "cpu":
        return None
    from .compile import compile_layers
    from .cpu.packed_linear import pack_linears

    transforms = [ModelTransform("packed linear layers", "pack", pack_linears)]
    # Which experts a token goes to decides what is computed: nothing to compile ahead.
    # Layers that are shared among ranks exchange their results: they run as transformers has them.
    shared = config.parallel.tensor_parallel_size > 1
    if config.facts is not None and not config.facts.is_moe and not shared:
        transforms.append(ModelTransform("compiled layers", "compile", compile_layers))
    return transforms
