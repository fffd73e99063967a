"""A GGUF file turned into the checkpoint format that everything else reads.

Done once, since it takes seconds to minutes. The values of a quantised file are a
float16 scale times an integer, plus an offset: float32 holds them, bfloat16 would
round them by up to 0.4 %. So quantised files are stored as float32, at the price of
twice bfloat16's space, and results can be reproduced in `--dtype float32`. Their
config still names bfloat16, since quantising has cost more than that rounding does:
where the hardware computes in it, that is the type `auto` should take.
Files whose matrices are bfloat16 or float16 keep their type.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerctl.config.gguf_metadata import read_gguf_metadata
from runnerctl.errors import ModelError
from runnerctl.models.checkpoint import CONFIG
from runnerctl.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from runnerctl.config.engine_config import DtypeName

VERSION = 1
"""Part of the cache's names: raise it when the same file is to be converted anew."""

# `general.file_type`: the type of all matrices. Vectors are always float32 in the file,
# but come from a checkpoint of the matrices' type.
_UNQUANTISED: dict[int, DtypeName] = {0: "float32", 1: "float16", 32: "bfloat16"}

# Vocabularies (`tokenizer.ggml.pre`) that split off every digit before GPT-2's pattern.
# transformers leaves that step out, and so cuts "\n\n1" differently from the model's training.
_SPLIT_DIGITS = {
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
}

_SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write `config.json`, safetensors and tokenizer files for a GGUF into `folder`.

    Raises:
        ModelError: the file is damaged, one part of several, or of an architecture that
            transformers cannot read from GGUF.
        OSError: `folder` cannot be written.
    """
    metadata = read_gguf_metadata(gguf)
    parts = metadata.get("split.count", 1)
    if parts > 1:
        raise ModelError(
            f"{gguf} is one of {parts} parts of a model, which are not read",
            remedy="join them with llama.cpp's gguf-split --merge, or take safetensors",
        )
    own_dtype = _UNQUANTISED.get(metadata.get("general.file_type", -1))
    # One of the library's bars is switched off by nothing else.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = None
        if "tokenizer.ggml.model" in metadata:
            tokenizer = _load_tokenizer(gguf, metadata)
        model = _load_model(gguf, own_dtype or "float32")
        _save(model, tokenizer, folder, compute_dtype=own_dtype or "bfloat16")


def converted_size(gguf: Path) -> int:
    """A low estimate of the bytes that `convert_gguf` writes."""
    quantised = read_gguf_metadata(gguf).get("general.file_type", -1) not in _UNQUANTISED
    return gguf.stat().st_size * (4 if quantised else 1)


def _load_model(gguf: Path, dtype: DtypeName) -> Any:
    import transformers

    arguments: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Newer transformers keep the weights quantised unless told otherwise.
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=dtype, local_files_only=True, **arguments
        )
    except (ValueError, KeyError, RuntimeError, ImportError, NotImplementedError) as error:
        raise ModelError(
            f"transformers cannot read {gguf}: {error}",
            remedy="if the file is whole (fetch it again to be sure), this kind of GGUF is not "
            "supported: take the model's safetensors checkpoint instead",
        ) from error
    # What is saved is quantised no more.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    return model


def _load_tokenizer(gguf: Path, metadata: Mapping[str, Any]) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True
        )
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(
            f"transformers cannot read the tokenizer in {gguf}: {error}",
            remedy="if the file is whole (fetch it again to be sure), "
            "take this model's safetensors checkpoint instead",
        ) from error
    # transformers 5.17 takes the first token for every special one.
    for name, key in _SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    if metadata.get("tokenizer.ggml.pre") in _SPLIT_DIGITS:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    return tokenizer


def _save(model: Any, tokenizer: Any, folder: Path, *, compute_dtype: str) -> None:
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # how a full disk shows
        raise OSError(str(error)) from error
    path = folder / CONFIG
    config = {**json.loads(path.read_text(encoding="utf-8")), "dtype": compute_dtype}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
