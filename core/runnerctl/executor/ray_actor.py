"""What runs in a Ray actor: one rank. Ray makes its calls one after the other."""

from __future__ import annotations

import os
import socket
from collections import deque
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from runnerctl.executor.answers import Failure, Returned
from runnerctl.executor.worker import Calls, WorkerStart, set_threads


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an actor runs.

    Attributes:
        node: Ray's name of the machine.
        address: at which other machines reach it.
        host: its own name.
        pid: of the process.
    """

    node: str
    address: str
    host: str
    pid: int


class RankActor:
    """Calls are made at once, and their outcomes wait until they are taken.

    So the next step is submitted while one is running, though one call comes after the other.
    """

    def __init__(self) -> None:
        self._outcomes: deque[Any] = deque()

    def where(self) -> Whereabouts:
        """Asked first."""
        ray: Any = import_module("ray")
        node = ray.get_runtime_context().get_node_id()
        return Whereabouts(node, ray.util.get_node_ip_address(), socket.gethostname(), os.getpid())

    def begin(self, start: WorkerStart, threads: str | None) -> None:
        """Become a rank.

        Args:
            start: what of.
            threads: for OpenMP as the user set them, or None. Ray sets them to the number of
                CPUs that the actor reserves, which is no measure of what there is to use.
        """
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        set_threads(start.ranks_here)
        self._calls = Calls(start)

    def call(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Call a method of the worker; `take` gives what comes of it."""
        self._outcomes.append(self._calls.make(method, arguments))

    def take(self) -> Returned | Failure:
        """What came of the oldest call that nobody took, waiting for it if it is a step."""
        return self._calls.settle(self._outcomes.popleft())

    def ping(self) -> None:
        """A sign of life, beside whatever runs."""
