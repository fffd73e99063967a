"""The C++ operators of this folder: compiled once per machine and torch, then loaded.

The compiler is called directly. `torch.utils.cpp_extension` would need setuptools, ninja
and Python's headers, and links an OpenMP runtime of its own; these sources need none of
them and use the threads that torch has.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from runnerctl.errors import ModelError
from runnerctl.models.cache import build_once
from runnerctl.models.progress import spinner

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_LIBRARY = "runnerctl_cpu.so"
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class Extension:
    """The loaded operators, `torch.ops.runnerctl_cpu`.

    Attributes:
        path: of the shared library, in the cache.
        build_seconds: what compiling took, 0 if it was there.
    """

    path: Path
    build_seconds: float


class BuildError(Exception):
    """Why there are no operators; one line, for the user."""


@functools.cache
def load_extension() -> Extension | str:
    """Compile the operators if this machine has not yet, and load them into this process.

    Takes some 15 s the first time. Both results are kept: a process tries once.

    Returns:
        The extension, or in one line why there is none. The compiler's own words are
        logged at debug level.
    """
    try:
        extension = build_extension()
    except BuildError as error:
        return str(error)
    import torch

    try:
        torch.ops.load_library(extension.path)
    except OSError as error:
        logger.debug("cannot load %s", extension.path, exc_info=True)
        return f"the compiled CPU operators cannot be loaded: {str(error).splitlines()[0]}"
    return extension


def build_extension() -> Extension:
    """Compile the operators into the cache unless they are there; load nothing.

    Raises:
        BuildError: no compiler, a compiler that fails, a cache that cannot be written.
    """
    compiler = find_compiler()
    sources = sorted(_FOLDER.glob("*.cpp"))
    flags = _flags()
    began = time.perf_counter()
    built = False

    def build(folder: Path) -> None:
        nonlocal built
        built = True
        with spinner("Building kernels for this CPU, once"):
            _compile(compiler, flags, sources, folder)

    try:
        folder = build_once(
            _key(compiler, flags, sources), build, section="cpu_operators", what="the CPU operators"
        )
    except ModelError as error:
        raise BuildError(str(error).splitlines()[0]) from error
    return Extension(folder / _LIBRARY, time.perf_counter() - began if built else 0.0)


def find_compiler() -> list[str]:
    """The command of a C++ compiler: CXX's, else the first there is.

    Raises:
        BuildError: there is none.
    """
    named = os.environ.get("CXX")
    for command in [named] if named else ["c++", "g++", "clang++"]:
        words = shlex.split(command)
        found = shutil.which(words[0]) if words else None
        if found:
            return [found, *words[1:]]
    if named:
        raise BuildError(f"CXX names {named!r}, which is not found: set it to a C++ compiler")
    raise BuildError("no C++ compiler is found: install g++, or name one with CXX")


def _flags() -> list[str]:
    import torch

    include = Path(torch.__file__).parent / "include"
    capability = torch.backends.cpu.get_cpu_capability()
    own_cpu = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [
        *("-O3", own_cpu, "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
        *(f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"),  # at::vec's switch
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")),
    ]


def _key(compiler: list[str], flags: list[str], sources: list[Path]) -> str:
    """Changes with whatever the library would change with; a home may serve many machines."""
    import torch

    digest = hashlib.sha256()
    compiler_file = Path(compiler[0]).resolve()
    for part in (*compiler, compiler_file, compiler_file.stat().st_mtime_ns, *flags):
        digest.update(f"{part}\0".encode())
    digest.update(f"{torch.__version__}\0{platform.machine()}\0{_cpu_features()}".encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: list[str], flags: list[str], sources: list[Path], folder: Path) -> None:
    import torch

    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        commands = [
            [*compiler, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        list(pool.map(_run, commands))
    # Without -fopenmp: what it needs is found in the runtime that torch has loaded, and two
    # of them would fight over the cores.
    libraries = Path(torch.__file__).parent / "lib"
    torch_libraries = (f"-L{libraries}", "-ltorch_cpu", "-lc10")
    _run([*compiler, "-shared", *map(str, objects), *torch_libraries, "-o", str(folder / _LIBRARY)])
    for path in objects:
        path.unlink()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise BuildError(
            f"the C++ compiler {command[0]} cannot be run: {error.strerror}"
        ) from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:])
        logger.debug("%s\nexit status %s\n%s", shlex.join(command), done.returncode, last)
        raise BuildError(
            f"the C++ compiler {command[0]} failed on the CPU operators "
            f"(exit status {done.returncode}; its words are in the debug log)"
        )
