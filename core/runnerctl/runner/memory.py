"""Where a runner computes, and how much memory its cache may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from runnerctl.config.engine_config import SchedulerSection

# On a CPU the memory is everybody's; on a GPU it is there for this.
_CPU_SHARE, _CPU_LIMIT = 0.4, 4 * 2**30
_GPU_SHARE = 0.9


def default_device() -> torch.device:
    """This process's CUDA device if there is one (the first, unless set), else the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


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


def step_bytes(scheduler: SchedulerSection, model: PretrainedConfig, itemsize: int) -> int:
    """What one step of the largest size holds beside the cache, about, in bytes.

    Of every token a few vectors as wide as the model and two as wide as its feed-forward
    layers, for one layer at a time; of every request its logits, and the float32 copy that is
    sampled from.

    Args:
        scheduler: how large a step may be.
        model: transformers' config of the text model.
        itemsize: bytes of an activation.
    """
    hidden = int(model.hidden_size)
    feed_forward = int(getattr(model, "intermediate_size", None) or 4 * hidden)
    of_token = (6 * hidden + 2 * feed_forward) * itemsize
    of_request = int(model.vocab_size) * (itemsize + torch.float32.itemsize)
    tokens = scheduler.max_num_batched_tokens
    return tokens * of_token + min(scheduler.max_num_seqs, tokens) * of_request
