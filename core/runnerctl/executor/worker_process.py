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

from runnerctl.executor.answers import Failure, Pong, Returned
from runnerctl.executor.worker import Worker, WorkerStart, set_threads


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
    calls: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
    outcomes: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls), daemon=True).start()
    answering = threading.Thread(target=_answer, args=(connection, outcomes), daemon=True)
    answering.start()
    worker: Worker | None = None
    while True:
        method, arguments = calls.get()
        if method == "shutdown":
            outcomes.put(None)
            answering.join()
            if worker is not None:
                worker.shutdown()
            break
        try:
            worker = worker or Worker(start)
            outcome = getattr(worker, method)(*arguments)
            outcomes.put(outcome if method == "execute" else Returned(outcome))
        except BaseException as error:  # all of it is the engine's to know
            outcomes.put(Failure.of(error))
    sys.stderr.flush()
    # Threads of libraries may still be about; there is nothing left to do for them.
    os._exit(0)


def _read(connection: _Connection, calls: SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    while True:
        try:
            call = connection.receive()
        except (EOFError, OSError):
            os._exit(1)  # the engine is gone, and whoever waits for us in an exchange is too
        if call[0] == "ping":
            connection.send(Pong())
        else:
            calls.put(call)


def _answer(connection: _Connection, outcomes: SimpleQueue[Any]) -> None:
    while (outcome := outcomes.get()) is not None:
        if not isinstance(outcome, Returned | Failure):
            try:
                outcome = Returned(outcome.result())
            except BaseException as error:  # whatever the step raised
                outcome = Failure.of(error)
        connection.send(outcome)


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
