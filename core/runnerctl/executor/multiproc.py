"""Ranks that are processes of this machine, each at the other end of a socket pair.

They are started as programs of their own, not by `multiprocessing`: that would run the
user's script once more in each of them, unless it is written for that. Calls and answers
are pickled, between processes of one user that no other process can reach; exceptions
travel as text.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from runnerctl.errors import WorkerError
from runnerctl.executor.answers import Failure, Pong, Returned
from runnerctl.executor.capacity import check_ranks_fit_machine
from runnerctl.executor.worker import WorkerStart
from runnerctl.parallel import ParallelLayout
from runnerctl.runner.protocol import WorkerContext

_PROGRAM = "from runnerctl.executor.worker_process import main; main({fd})"
_PING_EVERY_S = 1.0
_LET_GO_S = 5.0
_MOMENT_S = 0.2


class ProcessRanks:
    """See `Ranks` and the module's docstring.

    Args:
        context: what the workers' own are made from.
        layout: of the ranks.

    Raises:
        UserError: there are fewer GPUs here than ranks.
    """

    host: str | None = "127.0.0.1"

    def __init__(self, context: WorkerContext, layout: ParallelLayout) -> None:
        check_ranks_fit_machine(context.config, layout)
        self.size = layout.world_size
        self._timeout_s = context.config.parallel.worker_timeout
        self._workers: list[_WorkerProcess] = []
        try:
            for place in layout.places():
                start = WorkerStart(
                    context.config,
                    context.decision,
                    context.model_path,
                    place,
                    device_index=place.rank,
                    ranks_here=self.size,
                )
                self._workers.append(_WorkerProcess(place.rank, start, self._timeout_s))
        except BaseException:
            self.end(kindly=False)
            raise

    def send(self, method: str, *arguments: Any) -> None:
        """See `Ranks.send`."""
        message = pickle.dumps((method, arguments))
        for worker in self._workers:
            worker.send(message)

    def receive(self) -> list[Any]:
        """See `Ranks.receive`."""
        now = time.monotonic()
        for worker in self._workers:
            worker.heard_at = worker.asked_at = now
        while late := [worker for worker in self._workers if not worker.answers]:
            by_connection = {worker.connection: worker for worker in late}
            for connection in wait(list(by_connection), timeout=_PING_EVERY_S):
                by_connection[connection].take_message()  # type: ignore[index]
            self._look_for_silence(late)
            self._look_for_failures()
        self._look_for_failures()
        answers = [worker.answers.popleft() for worker in self._workers]
        return [answer.value for answer in answers if isinstance(answer, Returned)]

    def end(self, *, kindly: bool) -> None:
        """See `Ranks.end`."""
        if kindly:
            with suppress(WorkerError):
                self.send("shutdown")
        for worker in self._workers:
            worker.end(_LET_GO_S if kindly else 0.0)
        self._workers.clear()

    def _look_for_failures(self) -> None:
        """Raise the first failure, or what it comes from: others fail when a rank is gone."""
        for worker in self._workers:
            if worker.answers and isinstance(worker.answers[0], Failure):
                error = worker.answers[0].to_error(worker.rank)
                if isinstance(error, WorkerError):
                    for other in self._workers:
                        other.check_alive()
                raise error

    def _look_for_silence(self, late: list[_WorkerProcess]) -> None:
        now = time.monotonic()
        for worker in late:
            if now - worker.heard_at > self._timeout_s:
                raise WorkerError(
                    f"{worker} has given no sign of life for {self._timeout_s} seconds",
                    rank=worker.rank,
                    details="It is stopped, or its machine is overloaded.",
                )
            if now - worker.asked_at >= _PING_EVERY_S:
                worker.asked_at = now
                worker.send(pickle.dumps(("ping", ())))


class _WorkerProcess:
    """One process, and what it has said that nobody has taken yet."""

    def __init__(self, rank: int, start: WorkerStart, timeout_s: int) -> None:
        self.rank = rank
        self.answers: deque[Returned | Failure] = deque()
        self.heard_at = self.asked_at = time.monotonic()
        ours, theirs = socket.socketpair()
        # A process that is stopped reads nothing: sending must not wait for it for ever.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", timeout_s, 0))
        with ours, theirs:
            self.connection = Connection(os.dup(ours.fileno()))
            self._process = subprocess.Popen(
                # -P: a module beside the user's script must not shadow an installed one
                [sys.executable, "-P", "-c", _PROGRAM.format(fd=theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())},
            )
        self.send(pickle.dumps(start))

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self._process.pid})"

    def send(self, message: bytes) -> None:
        """Raises WorkerError if the process has ended, or does not read."""
        try:
            self.connection.send_bytes(message)
        except BlockingIOError:
            raise WorkerError(f"{self} does not take any messages", rank=self.rank) from None
        except OSError:
            raise self._ended() from None

    def take_message(self) -> None:
        """Read one message that is there. Raises WorkerError if the process has ended."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        self.heard_at = time.monotonic()
        if not isinstance(message, Pong):
            self.answers.append(message)

    def check_alive(self) -> None:
        """Raise WorkerError if the process has ended, or does so in a moment."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_MOMENT_S)
            raise self._ended()

    def end(self, within_s: float) -> None:
        """Wait so long for the process to end, then kill it."""
        with suppress(subprocess.TimeoutExpired):
            if within_s:
                self._process.wait(within_s)
        self._process.kill()
        self._process.wait()
        self.connection.close()

    def _ended(self) -> WorkerError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LET_GO_S)  # its socket is closed a moment before it is gone
        return WorkerError(
            f"{self} {_how_it_ended(self._process.returncode)}",
            rank=self.rank,
            details="Out of memory, perhaps: the system's log would say so."
            if self._process.returncode == -signal.SIGKILL
            else "",
        )


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "has closed its connection"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"was killed by {name}"
    return f"ended with exit code {code}"


def _import_path() -> Iterator[str]:
    """Where this process imports from, for processes that must import the same."""
    for entry in sys.path:
        yield entry or os.getcwd()
