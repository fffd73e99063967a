"""The source of transformers' models, if it is installed, read without importing it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal


def source_of(kind: Literal["modeling", "configuration"], model_type: str) -> str:
    """A file of the folder that is named after a model type; "" if there is none."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations or not model_type.isprintable():
        return ""
    name = model_type.replace("-", "_")
    if not name.isidentifier():
        return ""
    folders = [Path(place) / "models" for place in spec.submodule_search_locations]
    for folder in folders:
        for candidate in (name, name.removesuffix("_text")):
            path = folder / candidate / f"{kind}_{candidate}.py"
            if path.is_file():
                return path.read_text(encoding="utf-8", errors="replace")
    return ""
