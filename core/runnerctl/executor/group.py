"""The executor for several ranks, or for one that is not in this process.

Every call goes to all ranks, and each answers every call, in order. So a rank that is late
with an answer is a rank that is behind, and one that fails leaves the others waiting for it
in the middle of an exchange: whatever goes wrong anywhere ends all of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Protocol

from runnerctl.errors import UserError, WorkerError
from runnerctl.models.progress import spinner
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel
from runnerctl.runner.step import FinishedStep, StepHandle, StepPlan, StepResult


class Ranks(Protocol):
    """The processes of a group, and how to reach them.

    Attributes:
        size: how many there are.
        host: the address at which they meet; None if the first rank knows it.
    """

    size: int
    host: str | None

    def send(self, method: str, *arguments: Any) -> None:
        """Ask every rank to call a method of its `Worker`; does not wait.

        Raises:
            WorkerError: a rank has ended.
        """
        ...

    def receive(self) -> list[Any]:
        """Every rank's answer to the oldest call that is not answered yet, in order of ranks.

        A call that was interrupted may be made again: no answer is lost.

        Raises:
            UserError: a rank raised one.
            WorkerError: a rank raised something else, has ended, or says nothing.
        """
        ...

    def end(self, *, kindly: bool) -> None:
        """End all ranks and leave nothing behind. Doing it again changes nothing.

        Args:
            kindly: they are idle and may free what they hold first.
        """
        ...


class GroupExecutor:
    """Sends each call to every rank and waits for all of them. See `Executor`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._waiting: deque[_GroupStep] = deque()
        self._error: Exception | None = None
        self._calling = False

    def load(self) -> tuple[LoadedModel, KVCacheSpec]:
        """See `Executor.load`."""
        count = self._ranks.size
        with spinner(f"Starting {count} rank{'s' * (count > 1)}", terminal_only=True):
            if count > 1:
                host, port = self._call("open_store", self._ranks.host)[0]
                self._call("join", host, port)
            answers: list[tuple[LoadedModel, KVCacheSpec]] = self._call("load")
        model, spec = answers[0]
        # The blocks are the same on every rank: what the fullest one can take.
        free = [s.free_bytes for _, s in answers if s.free_bytes is not None]
        return model, replace(
            spec,
            available_bytes=min(s.available_bytes for _, s in answers),
            free_bytes=min(free) if free else None,
        )

    def start(self, num_blocks: int, max_model_len: int) -> None:
        """See `Executor.start`."""
        self._call("start", num_blocks, max_model_len)

    def execute(self, plan: StepPlan) -> StepHandle:
        """See `Executor.execute`."""
        try:
            if self._error is not None:
                raise self._error
            self._ranks.send("execute", plan)
        except (UserError, WorkerError) as error:
            self._fail(error)
            return FinishedStep(error)
        step = _GroupStep(self)
        self._waiting.append(step)
        return step

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        busy = self._calling or self._waiting
        self._ranks.end(kindly=self._error is None and not busy)
        self._waiting.clear()

    def take(self) -> None:
        """Wait for the oldest step and give its handle what came of it."""
        try:
            if self._error is not None:
                raise self._error
            result = _agreed(self._ranks.receive())
        except (UserError, WorkerError) as error:
            self._fail(error)
            self._waiting.popleft().outcome = error
        else:
            self._waiting.popleft().outcome = result

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        self._calling = True  # and it stays so after an interrupt
        try:
            self._ranks.send(method, *arguments)
            answers = self._ranks.receive()
            self._calling = False
            return answers
        except (UserError, WorkerError) as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """After the first error there are no ranks, and no other error to tell of."""
        if self._error is None:
            self._error = error
            self._ranks.end(kindly=False)


def _agreed(results: list[StepResult]) -> StepResult:
    """The result of a step, which every rank has.

    Raises:
        WorkerError: ranks sampled different tokens. What each keeps of its requests would be
            different from then on, and every exchange between them meaningless.
    """
    first = results[0]
    for rank, result in enumerate(results):
        for name, token in first.sampled_token_ids.items():
            other = result.sampled_token_ids.get(name)
            if other != token:
                raise WorkerError(
                    f"rank {rank} sampled token {other} for request {name} where rank 0 sampled "
                    f"{token}: the ranks do not compute the same",
                    rank=rank,
                    details="They have to run on processors of one kind, with the same libraries.",
                )
    return first


class _GroupStep:
    """A step that all ranks run."""

    def __init__(self, group: GroupExecutor) -> None:
        self._group = group
        self._taken = False
        self.outcome: StepResult | Exception | None = None

    def result(self) -> StepResult:
        """See `StepHandle.result`."""
        if self._taken:
            raise RuntimeError("StepHandle.result() was called twice")
        while self.outcome is None:
            self._group.take()
        self._taken = True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome
