"""The exceptions runnerctl raises, and what each says about whose fault it is.

The command line maps them to exit codes: `UserError` and its subclasses exit
with 2 (a setting or an input has to change), anything else with 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runnerctl.decision import Decision


class UserError(Exception):
    """Something the user can put right: a setting, a file, a prompt.

    `message` says what was wrong and `remedy` what to do about it; `setting`
    names the flag, key or variable at fault where there is one.
    """

    def __init__(self, message: str, *, remedy: str = "", setting: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.setting = setting

    def __str__(self) -> str:
        named = self.setting is None or self.setting in self.message
        where = "" if named else f"{self.setting}: "
        remedy = f"\n  {self.remedy}" if self.remedy else ""
        return f"{where}{self.message}{remedy}"


class ConfigError(UserError):
    """A configuration that cannot be served; carries the `Decision` that says why."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        errors = [p for p in decision.problems if p.severity == "error"]
        super().__init__("\n".join(str(problem) for problem in errors))


class ModelError(UserError):
    """A model that cannot be found, read or served: files, formats, architectures."""


class CannotBePagedError(ModelError):
    """An architecture whose answers would be wrong or unknown on a paged cache."""


class PromptError(UserError):
    """A prompt that cannot be served: empty, too long, unknown token ids."""


class PluginError(UserError):
    """A plugin that cannot be loaded, under `--strict-plugins` or in a worker."""


class WorkerError(Exception):
    """A rank that failed, ended or says nothing; the engine it belonged to is of no more use.

    `rank` is the first one at fault, and `details` its traceback or what is known of its end.
    """

    def __init__(self, message: str, *, rank: int, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details
        if details:
            self.add_note(details)
