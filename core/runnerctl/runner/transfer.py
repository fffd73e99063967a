"""From the host to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new tensor of `values` on the device.

    To a GPU it goes through pinned memory, which PyTorch keeps until the copy is done:
    the host goes on at once.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    pinned = torch.tensor(values, dtype=dtype, pin_memory=True)
    return pinned.to(device, non_blocking=True)
