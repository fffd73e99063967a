"""The process groups of a rank: who it exchanges tensors with.

`transformers` shards a model over the *default* process group and takes no other, so that
group is the one of tensor parallelism, and every other group is made beside it on the same
store. Nothing here pickles: tensors travel as they are.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed

from runnerctl.parallel import Place

dist: Any = torch.distributed  # its stubs know half of it


class RankGroup:
    """Ranks that gather tensors from each other.

    Attributes:
        rank, size: the place in this group, and how many there are.
    """

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self._backend = backend
        self.rank = rank
        self.size = size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, [size, *shape], in the order of ranks.

        Args:
            tensor: of the same shape and type on every rank; it has at least one element.
        """
        tensor = tensor.contiguous()
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self._backend._allgather_base(gathered.view(-1), tensor.view(-1)).wait()
        return gathered


@dataclass(frozen=True, slots=True)
class RankGroups:
    """What a rank belongs to.

    Attributes:
        pcp: the ranks that run parts of the same prefills, with the same part of the weights.
    """

    pcp: RankGroup


def open_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """Serve the store at which the ranks meet, on a free port of one address only.

    Returns:
        the store, and the port.
    """
    listening = socket.create_server((host, 0), family=_family(host), backlog=128)
    port = int(listening.getsockname()[1])
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )
    return store, port


def join_groups(
    place: Place, host: str, port: int, device: torch.device, timeout_s: float
) -> RankGroups:
    """Meet the other ranks. Every rank has to call this.

    Args:
        place: of this rank.
        host, port: of the store.
        device: a CUDA device takes NCCL, everything else gloo.
        timeout_s: how long one rank waits for another, here and in every later exchange.
    """
    timeout = timedelta(seconds=timeout_s)
    if interface := _interface_towards(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    layout = place.layout
    tp_size, pcp_size = layout.tensor_parallel_size, layout.prefill_context_parallel_size
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"tp of {place.pcp_rank}", store),
        rank=place.tp_rank,
        world_size=tp_size,
        timeout=timeout,
    )
    own = dist.PrefixStore(f"pcp of {place.tp_rank}", store)
    pcp = _backend(own, place.pcp_rank, pcp_size, device, timeout)
    return RankGroups(RankGroup(pcp, place.pcp_rank, pcp_size))


def leave_groups() -> None:
    """Let go of the groups of this process, if it has joined any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """A group that is not the default one, and has no say in who is in that."""
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, size, options)
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        options._devices = [gloo.create_device(interface=interface)]
    else:
        options._devices = [gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _interface_towards(host: str) -> str:
    """The network interface of this machine from which `host` is reached, or "" if unknown."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return str(name)
    return ""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
