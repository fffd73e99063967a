"""The journal: one line of JSON for each decision and each finished request. No torch here.

Made for machines: `tail -f`, `jq`, a log collector. Several processes may append to one
file. There is no text of prompts or answers in it, only counts and times.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerctl.errors import UserError

if TYPE_CHECKING:
    from runnerctl.decision import Decision
    from runnerctl.engine.live_request import LiveRequest

logger = logging.getLogger(__name__)

STDERR = Path("-")


class Journal:
    """A file, or stderr, that lines are appended to.

    The file is opened anew for each line, so that one may move it away at any time. A
    line that cannot be written is a warning in the log of this process: no answer is lost
    for it.

    Args:
        path: the file, made if it is not there; `-` is stderr.
        setting: how the user spelled the setting, for messages.

    Raises:
        UserError: the file cannot be opened for appending.
    """

    def __init__(self, path: Path, setting: str) -> None:
        self._path = path.expanduser()
        try:
            self._append(b"")
        except OSError as error:
            raise UserError(
                f"cannot append to {self._path}: {error.strerror or error}",
                remedy=f"give {setting} a file in a folder you may write to, or - for stderr",
                setting=setting,
            ) from error

    def decision(self, model: str, decision: Decision) -> None:
        """Write that a runner was chosen, or why none was: every field of the Decision."""
        self._write("decision", {"model": model} | json.loads(decision.to_json(indent=None)))

    def request(self, entry: LiveRequest, error: BaseException | None = None) -> None:
        """Write that an answer ended, by itself, by an abort or by an error of the step."""
        request = entry.request
        seconds, first = entry.age_s, entry.time_to_first_token_s
        generated = len(request.token_ids) - request.num_prompt_tokens
        self._write(
            "request",
            {
                "request_id": request.request_id,
                "num_prompt_tokens": request.num_prompt_tokens,
                "num_cached_tokens": request.num_cached_tokens or 0,
                "num_generated_tokens": generated,
                "finish_reason": request.finish_reason or "abort",
                "stop_reason": request.stop_reason,
                "error": None if error is None else type(error).__name__,
                "time_to_first_token_s": None if first is None else round(first, 6),
                "seconds": round(seconds, 6),
                "tokens_per_second": round(generated / seconds, 3) if seconds else 0.0,
                "num_preemptions": request.num_preemptions,
                "seed": request.sampling_params.seed,
            },
        )

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        line = json.dumps({"event": event, "time": now, "pid": os.getpid(), **fields}) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            logger.warning("cannot append to %s: %s", self._path, error.strerror or error)

    def _append(self, line: bytes) -> None:
        """In one write, so that the lines of two processes do not mix."""
        if self._path == STDERR:
            sys.stderr.write(line.decode())
            sys.stderr.flush()
            return
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(file, line) < len(line):
                raise OSError("only a part of a line was written; is the disk full?")
        finally:
            os.close(file)
