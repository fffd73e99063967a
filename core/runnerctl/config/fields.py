"""What each setting is, read from the sections in `engine_config`: kind, default, help.

Flags, variables and messages are all made from these, so that a new field in a
section is a flag, a key and a variable at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from runnerctl.config.engine_config import SECTIONS

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.fields import FieldInfo

Kind = Literal["integer", "bytes", "switch", "choice", "text", "path", "names"]

_SWITCH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SettingField:
    """One setting.

    Attributes:
        name: the field's name.
        section: the section it lives in.
        kind: how its value is written.
        default: what it is when nobody says anything; None for `model`.
        help: the description, for help texts.
        choices: the words allowed, for kind `choice`.
        expected: what a value must be, to complete "it must be ...".
    """

    name: str
    section: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[str, ...]
    expected: str

    def parse(self, raw: object) -> Any:
        """The value that `raw` (text, or what Python or YAML gave) means for this setting.

        Raises:
            ValueError: it means none. The message completes nothing; say `expected`.
        """
        return _adapter(self.section, self.name).validate_python(_PARSERS[self.kind](raw))


@cache
def setting_fields() -> Mapping[str, SettingField]:
    """Every setting by name, in the order of the sections."""
    return MappingProxyType(
        {
            name: _describe(name, section, info)
            for section, kind in SECTIONS.items()
            for name, info in kind.model_fields.items()
        }
    )


def _describe(name: str, section: str, info: FieldInfo) -> SettingField:
    annotation = _without_none(info.annotation)
    choices: tuple[str, ...] = ()
    kind: Kind
    if get_origin(annotation) is Literal:
        kind, choices = "choice", get_args(annotation)
        expected = f"one of {', '.join(choices)}"
    elif get_origin(annotation) is tuple:
        kind, expected = "names", "a list of names, or names separated by commas"
    elif annotation is bool:
        kind, expected = "switch", "true or false (1/0, yes/no and on/off do too)"
    elif annotation is int and name.endswith("_bytes"):
        kind, expected = "bytes", "a number of bytes above 0, such as 2GiB, 512MiB or 1073741824"
    elif annotation is int:
        kind, expected = "integer", "a whole number above 0"
    elif annotation is Path:
        kind, expected = "path", "a file to write to, or - for stderr"
    elif annotation is str:
        kind, expected = "text", "a name"
    else:
        raise TypeError(f"setting {name!r}: no flag can be made for {info.annotation!r}")
    default = None if info.is_required() else info.default
    return SettingField(name, section, kind, default, info.description or "", choices, expected)


def _without_none(annotation: Any) -> Any:
    """`int` for `Annotated[int, ...] | None`."""
    if get_origin(annotation) is Annotated:
        return _without_none(get_args(annotation)[0])
    arguments = get_args(annotation)
    if NoneType in arguments:
        (one,) = (a for a in arguments if a is not NoneType)
        return _without_none(one)
    return annotation


@cache
def _adapter(section: str, name: str) -> TypeAdapter[Any]:
    # one field alone, so that a mistake in another setting does not get in the way
    from pydantic import TypeAdapter

    info = SECTIONS[section].model_fields[name]
    annotated: Any = Annotated[info.annotation, info]
    return TypeAdapter(annotated)


def _integer(raw: object) -> object:
    if isinstance(raw, bool | float):
        raise ValueError("not a whole number")
    return raw.strip() if isinstance(raw, str) else raw


def _bytes(raw: object) -> object:
    if not isinstance(raw, str):
        return _integer(raw)
    match = _SIZE.fullmatch(raw.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("not a size")
    # float only where there is a fraction: whole numbers stay exact
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * _UNITS[match[2].lower()])


def _switch(raw: object) -> object:
    if isinstance(raw, bool):
        return raw
    try:
        return _SWITCH[str(raw).strip().lower()]
    except KeyError:
        raise ValueError("not a switch") from None


def _text(raw: object) -> object:
    return raw.strip() if isinstance(raw, str) else raw


def _path(raw: object) -> object:
    path = _text(raw)
    if path == "":
        raise ValueError("not a path")
    return path


def _choice(raw: object) -> object:
    # torch.float16 prints as "torch.float16"; recognised without importing torch
    if type(raw).__module__ == "torch":
        raw = str(raw).removeprefix("torch.")
    return raw.strip().lower() if isinstance(raw, str) else raw


def _names(raw: object) -> object:
    if isinstance(raw, str):
        return tuple(name for part in raw.split(",") if (name := part.strip()))
    if isinstance(raw, Mapping) or not isinstance(raw, Iterable):
        raise ValueError("not a list")
    parts = list(raw)
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("not a list of names")
    return _names(",".join(parts))


_PARSERS = {
    "integer": _integer,
    "bytes": _bytes,
    "switch": _switch,
    "choice": _choice,
    "text": _text,
    "path": _path,
    "names": _names,
}
