"""What the library sentence-transformers puts beside a checkpoint to say how it embeds.

`modules.json` lists what follows the model (pooling, dense layers, normalising), each with
a folder of its own; `sentence_bert_config.json` has the length it was trained for, and
`config_sentence_transformers.json` instructions to put in front of texts. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runnerctl.engine.pooling_params import PoolingMode
from runnerctl.errors import ModelError

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
INSTRUCTIONS = "config_sentence_transformers.json"
_DENSE_KEYS = {"in_features", "out_features", "bias", "activation_function"}
# In the order in which the library concatenates them if several are on.
_MODES: dict[str, PoolingMode] = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
_NAMES: dict[str, PoolingMode] = {
    **{mode: mode for mode in ("cls", "max", "mean", "mean_sqrt_len")},
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer after pooling.

    Attributes:
        folder: has its `model.safetensors`.
        in_features, out_features, bias: its shape.
        activation: the name of a torch module.
    """

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class EmbeddingFiles:
    """How a checkpoint wants to be used for embedding.

    Attributes:
        unknown: a module that is asked for and not known here, or "".
        pooling: the vectors that are made of the tokens', concatenated if several; empty if
            no file says.
        pooling_file: the file that says so, relative to the checkpoint.
        dense: layers after pooling.
        normalize: whether the embedding has length 1.
        max_length, length_file: in tokens, and the file that says so; None if none does.
        lower_case: texts are lowered before they become tokens.
        prompts: instructions by name.
        default_prompt_name: of the one that is used unasked.
        pools_prompt: the instruction's own tokens are pooled, too.
    """

    unknown: str = ""
    pooling: tuple[PoolingMode, ...] = ()
    pooling_file: str = ""
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = False
    max_length: int | None = None
    length_file: str = ""
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    pools_prompt: bool = True


def read_embedding_files(folder: Path) -> EmbeddingFiles:
    """Reads the files of a checkpoint folder; none of them has to be there.

    Raises:
        ModelError: a file cannot be read, or says what cannot be.
    """
    found: dict[str, Any] = {}
    if (folder / MODULES).is_file():
        _read_modules(folder, found)
    elif (folder / POOLING).is_file():
        _read_pooling(folder, POOLING, found)
    _read_length(folder, found)
    _read_instructions(folder, found)
    return EmbeddingFiles(**found)


def _read_modules(folder: Path, found: dict[str, Any]) -> None:
    modules = _read(folder / MODULES, list)
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        path = str(module.get("path", "")) if isinstance(module, dict) else ""
        if kind == "Transformer":
            if path.strip("./"):
                raise ModelError(
                    f"{MODULES} has the model itself in the folder {path!r}",
                    remedy="give a checkpoint that has it at its top",
                )
        elif kind == "Pooling" and not found.get("dense"):
            _read_pooling(folder, f"{path}/config.json", found)
        elif kind == "Dense" and not found.get("normalize"):
            found["dense"] = (*found.get("dense", ()), _read_dense(folder / path))
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Dropout":  # which does nothing outside training
            found["unknown"] = kind or str(module)


def _read_pooling(folder: Path, file: str, found: dict[str, Any]) -> None:
    config = _read(folder / file, dict)
    on = [name for name in config if name.startswith("pooling_mode_") and config[name] is True]
    named = [name.removeprefix("pooling_mode_") for name in on]
    modes = [mode for name, mode in _MODES.items() if name in named]
    unknown = sorted(set(named) - set(_MODES))
    if not on and isinstance(config.get("pooling_mode"), str):
        name = config["pooling_mode"]
        modes = [_NAMES[name]] if name in _NAMES else []
        unknown = [] if modes else [name]
    if unknown or not modes:
        said = f"names the pooling {', '.join(unknown)}" if unknown else "names no pooling"
        raise ModelError(
            f"{folder / file} {said}", remedy=f"known here are {', '.join(_MODES.values())}"
        )
    found["pooling"], found["pooling_file"] = tuple(modes), file
    found["pools_prompt"] = config.get("include_prompt", True) is not False


def _read_dense(folder: Path) -> DenseLayer:
    config = _read(folder / "config.json", dict)
    missing = _DENSE_KEYS - config.keys()
    if missing:
        raise ModelError(f"{folder / 'config.json'} lacks {', '.join(sorted(missing))}")
    return DenseLayer(
        folder,
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config["bias"]),
        str(config["activation_function"]).rpartition(".")[2],
    )


def _read_length(folder: Path, found: dict[str, Any]) -> None:
    # older versions of the library named it after the model: sentence_roberta_config.json
    for path in sorted(folder.glob("sentence_*_config.json")):
        config = _read(path, dict)
        found["lower_case"] = config.get("do_lower_case") is True
        if _is_length(config.get("max_seq_length")):
            found["max_length"], found["length_file"] = config["max_seq_length"], path.name
            return
    path = folder / "tokenizer_config.json"
    if found.get("pooling") and path.is_file():
        longest = _read(path, dict).get("model_max_length")
        # the library writes 1e30 where it knows no limit
        if _is_length(longest) and longest < 10**9:
            found["max_length"], found["length_file"] = longest, path.name


def _read_instructions(folder: Path, found: dict[str, Any]) -> None:
    path = folder / INSTRUCTIONS
    if not path.is_file():
        return
    config = _read(path, dict)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise ModelError(f"{path} has 'prompts' that are no texts by name")
    found["prompts"] = prompts
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"{path} has the default prompt {default!r}, which it does not define")
    found["default_prompt_name"] = default


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"{path} cannot be read: {reason}", remedy="fetch the checkpoint again"
        ) from error
    if not isinstance(content, kind):
        noun = "list" if kind is list else "object"
        raise ModelError(f"{path} does not hold a JSON {noun}", remedy="fetch it again")
    return content
