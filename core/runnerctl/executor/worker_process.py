"""The program of one rank on this machine: takes calls from a socket, answers in order.

One thread reads, so that it is known at once when the engine is gone, and a sign of life
can be given during a long step. The main thread makes the calls. A third one waits for
steps and answers, so that the next step is submitted while one is running.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from runnerctl.executor.answers import Pong
from runnerctl.executor.worker import Calls, WorkerStart, set_threads


def main(fd: int) -> None:
    """Serve the engine at the other end of the socket `fd` until it says so, or is gone."""
    # Ctrl-C is for the engine, which ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what the program prints is the engine's alone
    connection = _Connection(fd)
    start: WorkerStart = connection.receive()
    if start.place.rank:
        # One of us tells what all of us do; a crash is still seen, on the file behind it.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    set_threads(start.ranks_here)
    queue: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
    outcomes: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, queue), daemon=True).start()
    calls = Calls(start)
    answering = threading.Thread(target=_answer, args=(connection, calls, outcomes), daemon=True)
    answering.start()
    while (call := queue.get())[0] != "shutdown":
        outcomes.put(calls.make(*call))
    outcomes.put(None)
    answering.join()
    calls.make(*call)
    sys.stderr.flush()
    # Threads of libraries may still be about; there is nothing left to do for them.
    os._exit(0)


def _read(connection: _Connection, queue: SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    while True:
        try:
            call = connection.receive()
        except (EOFError, OSError):
            os._exit(1)  # the engine is gone, and whoever waits for us in an exchange is too
        if call[0] == "ping":
            connection.send(Pong())
        else:
            queue.put(call)


def _answer(connection: _Connection, calls: Calls, outcomes: SimpleQueue[Any]) -> None:
    while (outcome := outcomes.get()) is not None:
        connection.send(calls.settle(outcome))


class _Connection:
    """A connection on which several threads send."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)
        self._sending = threading.Lock()

    def receive(self) -> Any:
        return self._connection.recv()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        with self._sending:
            self._connection.send_bytes(data)
