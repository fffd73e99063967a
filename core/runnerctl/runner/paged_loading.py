"""From a checkpoint to a model that is ready for packed steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from runnerctl.errors import CannotBePagedError
from runnerctl.models.checkpoint import read_config
from runnerctl.parallel import batches_in_flight
from runnerctl.runner.attention.base import AttentionBackend
from runnerctl.runner.attention.interface import ATTN_IMPLEMENTATION, register_attention
from runnerctl.runner.attention.registry import choose_backend
from runnerctl.runner.memory import default_cache_bytes, free_memory_bytes, step_bytes
from runnerctl.runner.model_loader import load_model, resolve_dtype
from runnerctl.runner.paged_model import PagedModel
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel, WorkerContext
from runnerctl.runner.recurrent_model import RecurrentModel, has_recurrent_layers
from runnerctl.runner.transforms import AppliedTransform, Stage, apply_transforms


@dataclass(frozen=True, slots=True)
class LoadedPagedModel:
    """A model, the attention that fits it, and what the engine has to know of the two.

    Without attention layers there is no backend. `model` is a `RecurrentModel` where there
    are recurrent layers.

    Attributes:
        reserved_bytes: what steps in flight hold beside the cache.
    """

    model: PagedModel
    backend: AttentionBackend[Any] | None
    facts: LoadedModel
    reserved_bytes: int = 0

    def kv_cache_spec(self) -> KVCacheSpec:
        """The cache the model needs, and the memory there is for it now."""
        device = self.model.device
        free = free_memory_bytes(device)
        return KVCacheSpec(
            layers=self.model.layer_specs(),
            available_bytes=max(0, default_cache_bytes(device, free) - self.reserved_bytes),
            free_bytes=free,
        )


def load_paged_model(
    context: WorkerContext,
    device: torch.device,
    *,
    allow_compiled: bool,
    recurrent: bool = False,
) -> LoadedPagedModel:
    """Load, transform, check by a dry run, and choose the attention backend.

    Args:
        context: of the runner.
        device: where the model goes.
        allow_compiled: `auto` may choose a backend that builds native code.
        recurrent: the caller can run models with recurrent layers.

    Raises:
        CannotBePagedError: the architecture's answers would be wrong; says why.
        ModelError: the checkpoint cannot be served; says why and what to do.
        UserError: no attention backend serves this model here.
        PluginError: a plugin's transformation or backend is broken.
    """
    try:
        return _load(context, device, allow_compiled=allow_compiled, recurrent=recurrent)
    except CannotBePagedError as error:
        runners = context.plugins.runners.values()
        others = [spec.name for spec in runners if "unpaged" in spec.capabilities]
        if others and context.decision.runner not in others:
            error.remedy = f"pass --runner {others[0]}, which can serve it in another way"
        raise


def _load(
    context: WorkerContext, device: torch.device, *, allow_compiled: bool, recurrent: bool
) -> LoadedPagedModel:
    register_attention()
    config = context.config
    dtype = resolve_dtype(config.model.dtype, read_config(context.model_path), device)
    model = load_model(
        context.model_path,
        dtype=dtype,
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=ATTN_IMPLEMENTATION,
        tensor_parallel_size=context.place.layout.tensor_parallel_size,
    )

    def transform(*stages: Stage) -> tuple[AppliedTransform, ...]:
        return apply_transforms(model, config, context.decision, context.plugins, stages=stages)

    transforms = transform("fuse", "pack")
    if recurrent and has_recurrent_layers(model):
        paged: PagedModel = RecurrentModel(model)
    else:
        paged = PagedModel(model)
    chosen = _backend_of(paged, context, allow_compiled=allow_compiled)
    # Only now: the dry run would be the first thing that is compiled.
    if not config.runner.enforce_eager:
        transforms += transform("compile")
    backend = chosen(config.cache.block_size) if chosen else None
    facts = LoadedModel(
        vocab_size=paged.vocab_size,
        max_model_len=paged.max_model_len,
        attention_backend=backend.name if backend else "",
        transforms=transforms,
        dtype=str(dtype).removeprefix("torch."),
    )
    spec = context.plugins.runners[context.decision.runner or ""]
    of_step = step_bytes(
        config.scheduler, model.config.get_text_config(decoder=True), dtype.itemsize
    )
    return LoadedPagedModel(paged, backend, facts, batches_in_flight(spec) * of_step)


def _backend_of(
    paged: PagedModel, context: WorkerContext, *, allow_compiled: bool
) -> type[AttentionBackend[Any]] | None:
    config = context.config
    if not paged.layers:
        return None
    return choose_backend(
        config.runner.attention_backend,
        paged.layers,
        backends=context.plugins.attention_backends,
        device=paged.device,
        dtype=paged.dtype,
        block_size=config.cache.block_size,
        setting=config.where("attention_backend"),
        allow_compiled=allow_compiled,
    )
