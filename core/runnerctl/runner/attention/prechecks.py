"""What can be said of core's GPU backends without torch; for `explain`."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runnerctl.config import EngineConfig

# the device files of NVIDIA's driver on Linux, and under Windows' Linux
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def flash_attn(config: EngineConfig) -> str | None:
    """Whether the package is there, and a GPU."""
    if find_spec("flash_attn") is None:
        return "not installed (pip install flash-attn-4, or flash-attn)"
    return torch_flash(config)


def torch_flash(config: EngineConfig) -> str | None:
    """Whether there is a GPU; the kernel comes with torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    if not any(device.exists() for device in _DEVICES) and shutil.which("nvidia-smi") is None:
        return "it needs an NVIDIA GPU, and none was found"
    return None
