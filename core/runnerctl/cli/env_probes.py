"""What `runnerctl env` looks at. Each is asked alone: one that raises costs only its row."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runnerctl.runner.attention.registry import Backends
    from runnerctl.runner.attention.spec import RegisteredBackend

# distribution -> the module that shows whether it works; None: its version is enough
PACKAGES: dict[str, str | None] = {
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
    "triton": "triton",
    "accelerate": None,
    "gguf": None,
    "huggingface-hub": None,
    "ray": None,
    "pluggy": None,
    "pydantic": None,
    "typer": None,
}
# name as people know it -> key of torch.cpu.get_capabilities, flag in /proc/cpuinfo
_INSTRUCTIONS = {
    "AVX2": ("avx2", "avx2"),
    "AVX512": ("avx512_f", "avx512f"),
    "AVX512-VNNI": ("avx512_vnni", "avx512_vnni"),
    "AVX512-BF16": ("avx512_bf16", "avx512_bf16"),
    "AMX-INT8": ("amx_int8", "amx_int8"),
    "AMX-BF16": ("amx_bf16", "amx_bf16"),
    "NEON": ("neon", "asimd"),
    "SVE": ("sve", "sve"),
    "BF16": ("arm_bf16", "bf16"),
}
_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_GPU_QUERY_SECONDS = 5


def ask(probe: Callable[[], Any]) -> Any:
    """What a probe says, or `{"error": why not}`: a broken package must not end the rest."""
    try:
        return probe()
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())[:300]
        return {"error": f"{type(error).__name__}: {text}" if text else type(error).__name__}


def package(distribution: str) -> dict[str, str] | None:
    """Version of a package, and what its import raises; None if it is not installed."""
    try:
        found = {"version": version(distribution)}
    except PackageNotFoundError:
        return None
    module = PACKAGES.get(distribution)
    broken = ask(lambda: import_module(module) and None) if module else None
    return {**found, "error": f"import fails: {broken['error']}"} if broken else found


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and the instruction sets that matter here."""
    return {
        "model": ask(_cpu_model),
        "architecture": platform.machine(),
        "cores": ask(usable_cores),
        "instructions": ask(instructions),
    }


def usable_cores() -> int:
    """Cores this process may run on, or fewer if its container has a quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def instructions() -> list[str]:
    """Instruction sets by what torch found, which is what its kernels go by, else by Linux."""
    capabilities = ask(_torch_capabilities)
    if isinstance(capabilities, dict) and "error" not in capabilities:
        return [name for name, (key, _) in _INSTRUCTIONS.items() if capabilities.get(key)]
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [name for name, (_, flag) in _INSTRUCTIONS.items() if flag in flags]


def _torch_capabilities() -> Any:
    torch: Any = import_module("torch")
    return torch.cpu.get_capabilities()


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or "unknown"


def _cpuinfo(key: str) -> str:
    for line in _read(_CPUINFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def memory() -> dict[str, int]:
    """Main memory in bytes: all of it, what is available, and a container's limit."""
    kilobytes = {}
    for line in _read(_MEMINFO).splitlines():
        name, _, value = line.partition(":")
        kilobytes[name] = value.split()[0]
    found = {
        key: int(kilobytes[name]) * 1024
        for key, name in (("total", "MemTotal"), ("available", "MemAvailable"))
        if name in kilobytes
    }
    if not found:
        psutil: Any = import_module("psutil")
        machine = psutil.virtual_memory()
        found = {"total": machine.total, "available": machine.available}
    limit = _read(_CGROUP / "memory.max").strip()
    if limit.isdigit() and int(limit) < found["total"]:
        found["limit"] = int(limit)
    return found


def gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes and compute capability of each GPU: by torch, else by the driver."""
    if package("torch") is None:
        return _gpus_by_driver()
    torch: Any = import_module("torch")
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        capability = f"{device.major}.{device.minor}"
        found.append(
            {"name": device.name, "memory": device.total_memory, "compute_capability": capability}
        )
    return found


def ranks() -> dict[str, Any]:
    """What ranks of one engine would share here, and how they would talk.

    `device` is what each rank computes on, `room` how many of those there are, `exchange` the
    library that tensors go through, and `ray` the version of Ray, or None.
    """
    distributed: Any = import_module("torch.distributed")
    found = gpus()
    on_gpus = bool(found) and distributed.is_nccl_available()
    ray = package("ray")
    return {
        "device": "GPU" if on_gpus else "CPU core",
        "room": len(found) if on_gpus else usable_cores(),
        "exchange": "nccl" if on_gpus else "gloo" if distributed.is_gloo_available() else None,
        "ray": ray and ray["version"],
    }


def _gpus_by_driver() -> list[dict[str, Any]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    fields = "--query-gpu=name,memory.total,compute_cap"
    answer = subprocess.run(
        [program, fields, "--format=csv,noheader,nounits"],
        check=True,
        capture_output=True,
        text=True,
        timeout=_GPU_QUERY_SECONDS,
    )
    rows = [line.split(", ") for line in answer.stdout.strip().splitlines()]
    return [
        {"name": name, "memory": int(mebibytes) << 20, "compute_capability": capability}
        for name, mebibytes, capability in rows
    ]


def dtype() -> dict[str, str]:
    """What `--dtype auto` makes of a bfloat16 checkpoint here, and why."""
    from runnerctl.runner.model_loader import choose_dtype

    chosen, reason = choose_dtype("auto", {"dtype": "bfloat16"}, _device())
    return {"auto": str(chosen).removeprefix("torch."), "reason": reason}


def attention(backends: Backends) -> dict[str, Any]:
    """For each backend None, or why it cannot serve a usual layer: 32 heads of 128 on 8."""
    return {name: ask(partial(_why_not, backend)) for name, backend in backends.items()}


def _why_not(backend: RegisteredBackend) -> str | None:
    from runnerctl.config.engine_config import CacheSection
    from runnerctl.runner.attention.base import AttentionLayer
    from runnerctl.runner.attention.registry import load_backend
    from runnerctl.runner.model_loader import choose_dtype

    layer = AttentionLayer(0, 32, 8, 128, 128, 128**-0.5)
    device = _device()
    chosen, _ = choose_dtype("auto", {"dtype": "bfloat16"}, device)
    return load_backend(backend).why_not(layer, device, chosen, CacheSection().block_size)


def _device() -> Any:
    torch: Any = import_module("torch")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
