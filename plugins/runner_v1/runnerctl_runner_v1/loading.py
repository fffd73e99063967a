"""How V1 serves a model: packed, with recurrent state, or on transformers' own cache."""

from __future__ import annotations

import logging

import torch

from runnerctl.errors import CannotBePagedError
from runnerctl.models.checkpoint import read_config
from runnerctl.runner.model_loader import load_model, resolve_dtype
from runnerctl.runner.paged_loading import LoadedPagedModel, load_paged_model
from runnerctl.runner.paged_model import context_length
from runnerctl.runner.protocol import LoadedModel, WorkerContext
from runnerctl.runner.recurrent_model import RecurrentModel

from .own_cache import OwnCacheServing
from .packed import PackedServing
from .recurrent import RecurrentServing
from .rehearsal import rehearse
from .serving import Serving

logger = logging.getLogger(__name__)


def load_serving(context: WorkerContext, device: torch.device) -> Serving:
    """Load the model and find the way to serve it.

    Raises:
        ModelError: the checkpoint cannot be served, or not by ranks that share its weights;
            says why and what to do.
        UserError: the attention backend that was asked for does not serve it.
    """
    try:
        loaded = load_paged_model(context, device, allow_compiled=False, recurrent=True)
        return _serving_of(loaded, context.config.cache.block_size)
    except CannotBePagedError as error:
        if context.place.layout.tensor_parallel_size > 1:
            raise  # its weights would be whole on every rank
        reason = error.message
    return _on_own_cache(context, device, reason)


def _serving_of(loaded: LoadedPagedModel, block_size: int) -> Serving:
    if not isinstance(loaded.model, RecurrentModel):
        return PackedServing(loaded, block_size)
    serving = RecurrentServing(loaded, block_size)
    rehearse(serving, loaded.model, block_size)
    return serving


def _on_own_cache(context: WorkerContext, device: torch.device, reason: str) -> OwnCacheServing:
    config = context.config
    dtype = resolve_dtype(config.model.dtype, read_config(context.model_path), device)
    model = load_model(
        context.model_path,
        dtype=dtype,
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=None,
    )
    text_config = model.config.get_text_config(decoder=True)
    serving = OwnCacheServing(
        model,
        LoadedModel(
            vocab_size=int(text_config.vocab_size),
            max_model_len=context_length(text_config),
            attention_backend="transformers",
            dtype=str(dtype).removeprefix("torch."),
            can_share_prefixes=False,
            note=f"each request runs by itself on transformers' own cache: {reason}",
        ),
    )
    logger.warning("%s", serving.facts.note)
    return serving
