"""Where V2's steps run, so that the engine never waits to submit one.

On a CPU one thread owns every torch call: inference mode, grad mode and compiled code
are per thread. On a GPU the calling thread only queues kernels; sampled tokens come to
the host on a stream of their own, beside the next step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from runnerctl.runner.step import FinishedStep, StepHandle, StepResult

from .step_output import StepOutput

T = TypeVar("T")


class Lane(ABC):
    """Runs a runner's work in the order in which it comes."""

    @abstractmethod
    def call(self, work: Callable[[], T]) -> T:
        """Do something and wait for it; its errors are raised here."""

    @abstractmethod
    def launch(self, step: Callable[[], StepOutput]) -> StepHandle:
        """Start a step; its errors are raised by the handle."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what was started and free the lane."""


def make_lane(device: torch.device) -> Lane:
    """The lane for a device."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


class ThreadLane(Lane):
    """One thread; `launch` returns at once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runnerctl-v2")

    def call(self, work: Callable[[], T]) -> T:
        """See `Lane.call`."""
        return self._thread.submit(work).result()

    def launch(self, step: Callable[[], StepOutput]) -> StepHandle:
        """See `Lane.launch`."""
        return _FutureStep(self._thread.submit(lambda: step().to_result()))

    def close(self) -> None:
        """See `Lane.close`."""
        self._thread.shutdown(wait=True)


class StreamLane(Lane):
    """The calling thread and its current stream; results are copied on a second stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def call(self, work: Callable[[], T]) -> T:
        """See `Lane.call`."""
        return work()

    def launch(self, step: Callable[[], StepOutput]) -> StepHandle:
        """See `Lane.launch`."""
        try:
            output = step()
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._copies):
                on_host = output.map(self._to_host)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(self._copies)
        except Exception as error:  # the engine gets it from the handle, like any runner's
            return FinishedStep(error)
        return _CopiedStep(on_host, copied)

    def close(self) -> None:
        """See `Lane.close`."""
        torch.cuda.synchronize(self._device)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        # its memory must not be given away while the copy runs
        tensor.record_stream(self._copies)
        return tensor.to("cpu", non_blocking=True)  # PyTorch makes this a pinned tensor


class _FutureStep:
    """A step that the thread has done or will do."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future: Future[StepResult] | None = future

    def result(self) -> StepResult:
        """See `StepHandle.result`."""
        future = self._future
        if future is None:
            raise RuntimeError("StepHandle.result() was called twice")
        try:
            return future.result()
        finally:
            if future.done():  # not so after Ctrl-C, when the step may still be waited for
                self._future = None


class _CopiedStep:
    """A step whose output is on its way to the host."""

    def __init__(self, output: StepOutput, copied: torch.cuda.Event) -> None:
        self._output: StepOutput | None = output
        self._copied = copied

    def result(self) -> StepResult:
        """See `StepHandle.result`."""
        output, self._output = self._output, None
        if output is None:
            raise RuntimeError("StepHandle.result() was called twice")
        self._copied.synchronize()
        return output.to_result()
