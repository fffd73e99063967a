"""What a rank sends back: a value, an error as text, or a sign of life."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from runnerctl import errors
from runnerctl.errors import UserError, WorkerError

_TIMEOUT_HINT = " (--worker-timeout says how long ranks wait for each other)"


@dataclass(frozen=True, slots=True)
class Returned:
    """A call was done."""

    value: Any


@dataclass(frozen=True, slots=True)
class Pong:
    """The process is alive, whatever it is doing."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call raised. Plain text, since not every exception survives the way between processes.

    Attributes:
        kind: name of the exception's class.
        message: what it said.
        remedy, setting: of a `UserError`.
        trace: where it was raised.
    """

    kind: str
    message: str
    remedy: str
    setting: str | None
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What is told of an error."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, UserError):
            kind = type(error).__name__
            return cls(kind, error.message, error.remedy, error.setting, trace)
        return cls(type(error).__name__, str(error), "", None, trace)

    def to_error(self, rank: int) -> UserError | WorkerError:
        """The error to raise in the engine: the same kind if it is the user's to put right."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, UserError):
            return kind(self.message, remedy=self.remedy, setting=self.setting)
        hint = _TIMEOUT_HINT if "timed out" in self.message.lower() else ""
        return WorkerError(
            f"rank {rank} failed with {self.kind}: {self.message}{hint}",
            rank=rank,
            details=self.trace,
        )
