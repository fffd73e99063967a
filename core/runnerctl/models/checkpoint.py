"""What a checkpoint folder holds: its config and its weight files, checked before loading.

Only safetensors are read. Pickled weights run code when they are opened, so they
are named in an error and left alone. No torch here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runnerctl.errors import ModelError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's `config.json` as a dict.

    Raises:
        ModelError: there is none, or it is not a JSON object.
    """
    return _read_json(folder / CONFIG, remedy="give a folder that holds a whole checkpoint")


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, each found to be complete.

    Reads headers only, so it costs milliseconds, and says what `from_pretrained`
    would say with a traceback.

    Raises:
        ModelError: no safetensors, a missing shard, a truncated or corrupt file.
    """
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / WEIGHTS_INDEX).is_file():
        files = _shards(folder)
    else:
        raise _no_weights(folder)
    for path in files:
        _check_complete(path)
    return files


def has_safetensors(folder: Path) -> bool:
    """Whether `folder` has weights under the names that are read."""
    return (folder / WEIGHTS).is_file() or (folder / WEIGHTS_INDEX).is_file()


def _shards(folder: Path) -> list[Path]:
    index = _read_json(folder / WEIGHTS_INDEX, remedy="fetch the checkpoint again")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{folder / WEIGHTS_INDEX} has no weight_map", remedy="fetch the checkpoint again"
        )
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(names)} weight files are missing in {folder}: "
            + ", ".join(missing[:5])
            + (" ..." if len(missing) > 5 else ""),
            remedy="fetch the checkpoint again; the download was not complete",
        )
    return [folder / name for name in names]


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return ModelError(
            f"{folder} has its weights only as pickle files ({', '.join(pickles[:3])}), "
            "which can run any code when they are opened; they are not read",
            remedy="take a checkpoint with safetensors, or convert this one with "
            "save_pretrained of transformers where you trust it",
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return ModelError(
            f"{folder} has {', '.join(others[:3])} but neither {WEIGHTS} nor {WEIGHTS_INDEX}",
            remedy=f"rename the file to {WEIGHTS}, or add the index of the shards",
        )
    return ModelError(
        f"{folder} has no weights ({WEIGHTS} or {WEIGHTS_INDEX})",
        remedy="give a folder that holds a whole checkpoint",
    )


def _check_complete(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        if file.read(64).startswith(b"version https://git-lfs"):
            raise ModelError(
                f"{path} is a git-lfs pointer, not the weights", remedy="run `git lfs pull` there"
            )
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is truncated or not a safetensors file ({error})",
            remedy="fetch the file again",
        ) from error


def _read_json(path: Path, *, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}", remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", remedy=remedy) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object", remedy=remedy)
    return content
