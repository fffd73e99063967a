"""Where a runner computes, and how much memory its cache may take."""

from __future__ import annotations

import psutil
import torch

# On a CPU the memory is everybody's; on a GPU it is there for this.
_CPU_SHARE, _CPU_LIMIT = 0.4, 4 * 2**30
_GPU_SHARE = 0.9


def default_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def free_memory_bytes(device: torch.device) -> int:
    """Memory that nobody uses now, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def default_cache_bytes(device: torch.device, free_bytes: int) -> int:
    """The share of the free memory that the KV cache takes unasked, in bytes."""
    if device.type == "cuda":
        return int(free_bytes * _GPU_SHARE)
    return min(int(free_bytes * _CPU_SHARE), _CPU_LIMIT)
