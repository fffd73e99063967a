"""A file of prompts, one JSON object per line, checked as a whole before anything runs."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.errors import PromptError, UserError
from runnerctl.suggest import did_you_mean

FORMS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_SHOWN = 100  # bad lines; a file of another kind has as many as it has lines


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of the file.

    Attributes:
        line: its number, from 1.
        index: its place among the prompts, from 0; blank lines do not count.
        id: the name that its answer gets, if it has one.
        form: which of `FORMS` its prompt has, and
        content: that prompt.
        params: the flags, overridden by the sampling fields of the line.
    """

    line: int
    index: int
    id: str | int | None
    form: str
    content: Any
    params: SamplingParams

    @property
    def key(self) -> str | int:
        """What its answer is found by: the id, or the index without one."""
        # an id that is a number is not the index of another prompt
        return self.index if self.id is None else f"id {json.dumps(self.id)}"

    def digest(self, *context: object) -> str:
        """A short hash of prompt and parameters, and of what else they mean something with."""
        parts = [*context, self.form, self.content, asdict(self.params)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read_prompts(source: str, params: SamplingParams, *, raw: bool) -> list[PromptLine]:
    """All prompts of a file.

    Args:
        source: a path; `-` is stdin.
        params: for fields that a line does not set.
        raw: no chat template, so no conversations either.

    Raises:
        UserError: the file cannot be read, or is empty.
        PromptError: lists every line that is wrong.
    """
    found: list[PromptLine] = []
    problems: list[tuple[int, str]] = []
    first_with: dict[str | int, int] = {}
    for number, content in lines_of(source, "--prompts-file"):
        if not content.strip():
            continue
        index = len(found) + len(problems)
        try:
            one = _read_line(content, number, index, params, raw)
            first = first_with.setdefault(one.key, number)
            if first != number:
                raise PromptError(f"the id {one.id!r} is also that of line {first}")
        except UserError as exc:
            problems.append((number, on_one_line(exc)))
        else:
            found.append(one)
    if problems:
        raise bad_lines(source, problems)
    if not found:
        raise PromptError(f"{_named(source)} has no prompts", setting="--prompts-file")
    return found


def bad_lines(source: str, problems: list[tuple[int, str]], done: str = "answered") -> PromptError:
    """One error for all lines that are wrong; pairs of line number and message.

    `done` is what cannot be done with them.
    """
    count = f"{len(problems)} line{'s' if len(problems) != 1 else ''}"
    shown = [f"  line {number}: {message}" for number, message in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        shown.append(f"  and {len(problems) - _SHOWN} more")
    return PromptError(
        f"{_named(source)}: {count} cannot be {done}, and nothing was run\n" + "\n".join(shown)
    )


def on_one_line(exc: UserError) -> str:
    """What was wrong and what to do, for a list of such."""
    return "; ".join(part for part in (exc.message, exc.remedy) if part)


def _named(source: str) -> str:
    return "stdin" if source == "-" else source


def lines_of(source: str, setting: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers from 1; `-` is stdin.

    Raises:
        UserError: it cannot be read; blames `setting`.
    """
    try:
        if source == "-":
            yield from _numbered(sys.stdin.buffer)
        else:
            with Path(source).open("rb") as file:
                yield from _numbered(file)
    except OSError as exc:
        raise UserError(
            f"{_named(source)} cannot be read: {exc.strerror or exc}", setting=setting
        ) from exc


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, content in enumerate(file, 1):
        # some editors begin a file with this mark
        yield number, content.removeprefix(b"\xef\xbb\xbf") if number == 1 else content


def _read_line(
    content: bytes, number: int, index: int, params: SamplingParams, raw: bool
) -> PromptLine:
    record = parse_object(content)
    known = (*FORMS, "id", *_SAMPLING)
    for key in record:
        if key not in known:
            raise PromptError(f"unknown key {key!r}{did_you_mean(key, known)}")
    forms = [form for form in FORMS if form in record]
    if len(forms) != 1:
        has = " and ".join(map(repr, forms)) or "none of them"
        raise PromptError(f"give one of 'prompt', 'prompt_token_ids' and 'messages'; it has {has}")
    form = forms[0]
    _FORM_CHECKS[form](record[form])
    if form == "messages" and raw:
        raise PromptError("'messages' need the chat template, which --raw leaves out")
    name = id_of(record)
    sampling = {key: record[key] for key in record if key in _SAMPLING}
    return PromptLine(number, index, name, form, record[form], _override(params, sampling))


def id_of(record: Mapping[str, Any]) -> str | int | None:
    """The name that the answer to a line gets, if it has one.

    Raises:
        PromptError: it is neither text nor a number.
    """
    name = record.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise PromptError(f"'id' is {name!r}; it must be text or an integer")
    return name


def parse_object(content: bytes) -> dict[str, Any]:
    """A line as a JSON object.

    Raises:
        PromptError: it is none, or holds what is no text.
    """
    try:
        text = content.decode("utf-8")
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise PromptError("not UTF-8 text") from None
    except UnicodeEncodeError:
        raise PromptError("half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError) as exc:
        raise PromptError(f"not JSON: {exc}") from None
    if not isinstance(record, dict):
        raise PromptError(f'{type(record).__name__}, not an object as in {{"prompt": "..."}}')
    return record


def _check_text(value: Any) -> None:
    if not isinstance(value, str):
        raise PromptError(f"'prompt' is {type(value).__name__}; it must be text")
    if not value.strip():
        raise PromptError("'prompt' is empty")


def _check_token_ids(value: Any) -> None:
    if not value or not _is_ints(value):
        raise PromptError("'prompt_token_ids' must be a list of at least one integer")


def _check_messages(value: Any) -> None:
    fine = isinstance(value, list) and all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and _is_texts([*m.values()])
        for m in value
    )
    if not value or not fine:
        raise PromptError(
            "'messages' must be a list of objects with the texts 'role' and 'content'"
        )


_FORM_CHECKS: dict[str, Callable[[Any], None]] = {
    "prompt": _check_text,
    "prompt_token_ids": _check_token_ids,
    "messages": _check_messages,
}


def _override(params: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    for name in ("ignore_eos", "skip_special_tokens"):
        if not isinstance(given.get(name, True), bool):
            raise PromptError(f"{name} is {given[name]!r}; it must be true or false")
    try:
        if "logit_bias" in given:  # the keys of a JSON object are text
            pairs = {int(token): bias for token, bias in given["logit_bias"].items()}
            given = {**given, "logit_bias": pairs}
        return replace(params, **given)
    except (AttributeError, TypeError, ValueError):
        said = ", ".join(f"{name}: {json.dumps(value)}" for name, value in given.items())
        raise PromptError(f"a sampling field is of the wrong type: {said}") from None


def _is_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
