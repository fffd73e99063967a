"""Decoder layers compiled one by one, for CPUs.

`torch.compile` of a whole model takes minutes, and one graph per layer is one graph for
all layers that are alike: weights are inputs, and attention is one opaque operator
(`runnerctl.runner.attention.compiled`). What is gained is the glue: norms, rotary
embedding, activation and residuals become a few fused loops.
"""

from __future__ import annotations

import logging
import os

from torch import nn
from torch._inductor import config as inductor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import PreTrainedModel

from runnerctl.models.cache import cache_dir
from runnerctl.models.progress import spinner
from runnerctl.runner.paged_model import rehearse

from .cpu.build import BuildError, find_compiler

logger = logging.getLogger(__name__)

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Both sides of the only size that compiled code is specialised on: one token.
_REHEARSALS = (1, 2)


def compile_layers(model: PreTrainedModel) -> str | None:
    """Compile a model's decoder layers, or say why they run eagerly.

    A compiler that fails is no reason to fail: the layers are then as they were.
    """
    try:
        find_compiler()
    except BuildError as error:
        return _eagerly(str(error))
    layers = decoder_layers(model)
    if not layers:
        return _eagerly(f"the layers of {type(model).__name__} are not known")
    _keep_what_is_compiled()
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        # In this process: one graph at a time gains nothing from workers, which would stay.
        with (
            inductor.patch(compile_threads=1),
            spinner("Compiling the model's layers", terminal_only=True),
        ):
            for num_tokens in _REHEARSALS:
                rehearse(model, num_tokens)
    except Exception as error:  # whatever the compiler raises
        for layer in layers:
            layer._compiled_call_impl = None
        logger.debug("compiling failed", exc_info=True)
        # what the compiler was doing is in the log; its inner error is the reason
        cause = getattr(error, "inner_exception", error)
        first_line = (str(cause).strip().splitlines() or [""])[0]
        return _eagerly(f"compiling failed ({type(cause).__name__}: {first_line})")
    return f"compiled {len(layers)} layers"


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that transformers calls the layers of this architecture, outermost only."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _keep_what_is_compiled() -> None:
    """In our cache folder, unless the user named another one.

    torch's own is under the directory for temporary files, and it writes that into the
    environment itself as soon as it is imported.
    """
    if os.environ.get(_CACHE_VARIABLE) in (None, default_cache_dir()):
        os.environ[_CACHE_VARIABLE] = str(cache_dir() / "compiled")


def _eagerly(reason: str) -> str:
    logger.warning("V2 runs this model's layers eagerly: %s", reason)
    return f"layers run eagerly: {reason}"
