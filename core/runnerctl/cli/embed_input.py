"""The texts of `runnerctl embed` and `classify`: arguments, lines of stdin, or JSON lines."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from runnerctl.cli.batch_input import bad_lines, id_of, lines_of, on_one_line, parse_object
from runnerctl.cli.generate_load import as_unicode
from runnerctl.errors import PromptError, UserError
from runnerctl.suggest import did_you_mean

_KEYS = ("prompt", "prompt_token_ids", "text_pair", "id")


@dataclass(frozen=True, slots=True)
class TextLine:
    """One text.

    Attributes:
        line: its number in the file, from 1; 0 of an argument.
        index: its place among the texts, from 0; blank lines do not count.
        id: the name that its answer gets, if it has one.
        content: as `LLM.embed` takes it.
    """

    line: int
    index: int
    id: str | int | None
    content: dict[str, Any]

    @property
    def key(self) -> str | int:
        """What its answer is found by, as `PromptLine.key`."""
        return self.index if self.id is None else f"id {json.dumps(self.id)}"

    def digest(self, *context: object) -> str:
        """A short hash of the text, and of what else its answer depends on."""
        parts = json.dumps([*context, self.content], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


def read_texts(arguments: Sequence[str], file: str | None, command: str) -> list[TextLine]:
    """What there is to read.

    Args:
        arguments: texts; without them, or with `-`, lines of stdin.
        file: JSON lines instead; `-` is stdin.
        command: for messages.

    Raises:
        UserError: the file cannot be read.
        PromptError: there is nothing, or something is wrong; lists every line that is.
    """
    if file is not None:
        if arguments:
            raise UserError("--input and a TEXT were both given", remedy="give one of them")
        return _from_lines(lines_of(file, "--input"), file, is_json=True)
    if arguments and list(arguments) != ["-"]:
        for text in arguments:
            if not text.strip():
                raise PromptError("a TEXT is empty")
        return [
            TextLine(0, index, None, {"prompt": as_unicode(text, "a TEXT")})
            for index, text in enumerate(arguments)
        ]
    if sys.stdin is None or (not arguments and sys.stdin.isatty()):
        raise PromptError(
            "there is no text",
            remedy=f'give some, as in: runnerctl {command} MODEL "A text" "Another"; or pipe in '
            "one per line",
        )
    return _from_lines(lines_of("-", "TEXT"), "-", is_json=False)


def check_texts(check: Any, lines: Sequence[TextLine], source: str) -> None:
    """See whether a model takes every text.

    Args:
        check: `LLM.check_texts` with its parameters.
        lines: the texts.
        source: where they came from, for messages; `-` is stdin.

    Raises:
        UserError: lists every line that it does not take.
    """
    try:
        check([line.content for line in lines])
        return
    except UserError:
        if not lines[0].line:
            raise
    problems = []
    for line in lines:
        try:
            check([line.content])
        except PromptError as exc:
            problems.append((line.line, on_one_line(exc)))
    if problems:
        raise bad_lines(source, problems, "read")


def _from_lines(
    numbered: Iterable[tuple[int, bytes]], source: str, *, is_json: bool
) -> list[TextLine]:
    found: list[TextLine] = []
    problems: list[tuple[int, str]] = []
    first_with: dict[str | int, int] = {}
    for number, content in numbered:
        if not content.strip():
            continue
        index = len(found) + len(problems)
        try:
            one = _from_json(content, number, index) if is_json else _plain(content, number, index)
            first = first_with.setdefault(one.key, number)
            if first != number:
                raise PromptError(f"the id {one.id!r} is also that of line {first}")
        except UserError as exc:
            problems.append((number, on_one_line(exc)))
        else:
            found.append(one)
    if problems:
        raise bad_lines(source, problems, "read")
    if not found:
        raise PromptError(f"{'stdin' if source == '-' else source} has no texts")
    return found


def _plain(content: bytes, number: int, index: int) -> TextLine:
    try:
        text = content.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise PromptError("not UTF-8 text") from None
    return TextLine(number, index, None, {"prompt": text})


def _from_json(content: bytes, number: int, index: int) -> TextLine:
    record = parse_object(content)
    for key in record:
        if key not in _KEYS:
            raise PromptError(f"unknown key {key!r}{did_you_mean(key, _KEYS)}")
    name = id_of(record)
    return TextLine(number, index, name, {k: v for k, v in record.items() if k != "id"})
