"""The file of answers: it grows line by line, and says what need not be computed again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from runnerctl.errors import UserError

_START = b'{"index": '  # of every line that is written here


def finished(path: Path, digests: Mapping[str | int, str]) -> tuple[set[str | int], int]:
    """What an earlier run left in a file.

    Args:
        path: the file; it need not exist.
        digests: of every prompt, by what its answer is found by.

    Returns:
        The keys of prompts that are answered, and the length of the file in bytes up to
        where it can go on: a last line that was cut off in the middle is not part of it.

    Raises:
        UserError: the file cannot be read, is not one of answers, or is one of answers to
            other prompts. It is left as it is.
    """
    if not path.is_file():  # a pipe or a device can be written but has no past
        return set(), 0
    done: set[str | int] = set()
    length = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and _is_beginning(line):
                    break  # the last one, cut off
                done.add(_key(line, digests, f"{path} line {number}"))
                length += len(line)
    except OSError as exc:
        raise _unusable(path, exc) from exc
    return done, length


def open_for_answers(path: Path, length: int) -> BinaryIO:
    """The file, cut to `length` bytes, to write at its end.

    Raises:
        UserError: it cannot be written.
    """
    try:
        # unbuffered: a line is in the file, whole, as soon as it is written
        file = path.open("ab", buffering=0)
        if path.is_file():
            os.truncate(file.fileno(), length)
    except OSError as exc:
        raise _unusable(path, exc) from exc
    return file


def line_of(record: Mapping[str, Any], *, ascii_only: bool = False) -> str:
    """A record as one line, as `finished` reads it back."""
    return json.dumps(record, ensure_ascii=ascii_only) + "\n"


def _is_beginning(line: bytes) -> bool:
    return line.startswith(_START) or _START.startswith(line)


def _key(line: bytes, digests: Mapping[str | int, str], where: str) -> str | int:
    try:
        record = json.loads(line)
        key = record["index"] if record.get("id") is None else f"id {json.dumps(record['id'])}"
        is_ours = key in digests and digests[key] == record["digest"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _refuse(f"{where} is no answer of an earlier run") from None
    if not is_ours:
        name = key if isinstance(key, str) else f"index {key}"
        raise _refuse(
            f"{where} ({name}) answers another prompt, or one with another model or other "
            f"parameters"
        )
    return key


def _refuse(message: str) -> UserError:
    return UserError(
        message,
        remedy="take another file, or start this one anew with --overwrite",
        setting="--output",
    )


def _unusable(path: Path, exc: OSError) -> UserError:
    return UserError(f"{path}: {exc.strerror or exc}", setting="--output")
