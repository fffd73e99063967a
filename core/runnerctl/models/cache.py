"""The cache directory: each folder in it is whole or absent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runnerctl.errors import ModelError
from runnerctl.models.progress import say

_VARIABLE = "RUNNERCTL_CACHE_DIR"


def cache_dir() -> Path:
    """`RUNNERCTL_CACHE_DIR`, else `runnerctl` under `XDG_CACHE_HOME` or `~/.cache`."""
    own = os.environ.get(_VARIABLE)
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "runnerctl"


def models_dir() -> Path:
    """Where the folders of models that `build_once` makes are."""
    return cache_dir() / "models"


def build_once(
    name: str,
    build: Callable[[Path], None],
    *,
    needs_bytes: int = 0,
    section: str = "models",
    what: str = "this model",
) -> Path:
    """The folder `name` of a section of the cache, made if it is not there.

    `build` fills a temporary folder beside the final place; only when it returns is the
    folder renamed. An exception, Ctrl-C included, removes it. Of several processes one
    builds and the others wait; what a killed one left is removed by the next.

    Args:
        name: of the folder; must change whenever its contents would.
        build: called with the empty folder to fill.
        needs_bytes: space it takes at most, to fail early on a full disk.
        section: the folder of the cache that it lies in; models have one of their own.
        what: is being prepared, told to whoever waits for another process to finish it.

    Raises:
        ModelError: the cache cannot be written.
    """
    folder = cache_dir() / section
    final = folder / name
    if final.is_dir():
        _note_use(final)
        return final
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _require_space(folder, needs_bytes)
        with _locked(folder / f".{name}.lock", what):
            if not final.is_dir():
                _build(final, build)
    except OSError as error:
        raise ModelError(
            f"the cache in {folder} cannot be written: {error}",
            remedy=f"make room or give access there, or set {_VARIABLE} to another directory",
            setting=_VARIABLE if os.environ.get(_VARIABLE) else None,
        ) from error
    return final


def _note_use(folder: Path) -> None:
    """The folder's own time is when it was last used: nothing in it changes."""
    with suppress(OSError):  # a cache that one may only read
        os.utime(folder)


def _build(final: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{final.name}.tmp-"
    for stale in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        build(temporary)
        os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"Waiting for another process that is preparing {what}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _require_space(folder: Path, needs_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needs_bytes:
        raise OSError(f"{needs_bytes / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB free")
