"""`Problem`: one thing that is wrong, or worth knowing, about a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What `validate_config` returns, and what the host itself reports.

    Attributes:
        severity: `error` stops a start, `warning` and `note` are only shown.
        message: what is wrong, in a sentence that stands alone.
        remedy: what to do about it.
        setting: the flag, key or variable at fault as the user wrote it, or None.
        plugin: who says so. The host fills it in; a plugin leaves it None.

    Raises:
        ValueError: an unknown severity, an empty message, or a remedy or setting that is
            not text.
    """

    severity: Severity
    message: str
    remedy: str = ""
    setting: str | None = None
    plugin: str | None = None

    def __post_init__(self) -> None:
        if self.severity not in get_args(Severity):
            allowed = ", ".join(get_args(Severity))
            raise ValueError(f"severity must be one of {allowed}, not {self.severity!r}")
        if not isinstance(self.message, str) or not self.message.strip():
            raise ValueError("a Problem needs a message that says what is wrong")
        if not isinstance(self.remedy, str):
            raise ValueError(f"a Problem's remedy must be text, not {self.remedy!r}")
        if not isinstance(self.setting, str | None):
            raise ValueError(f"a Problem's setting must be text or None, not {self.setting!r}")

    def __str__(self) -> str:
        named = self.setting is None or self.setting in self.message
        where = "" if named else f"{self.setting}: "
        remedy = f"\n  {self.remedy}" if self.remedy else ""
        return f"{where}{self.message}{remedy}"
