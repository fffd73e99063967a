"""How a fault of a plugin is reported: who, which distribution, what, and the way out."""

from __future__ import annotations

import logging
from typing import Literal

from runnerctl.decision import PluginRecord
from runnerctl.plugin_checks import explain
from runnerctl.plugin_discovery import is_builtin
from runnerctl.problems import Problem
from runnerctl.suggest import block_flag

logger = logging.getLogger(__name__)


def load_fault(record: PluginRecord, why: str, severity: Literal["error", "warning"]) -> Problem:
    """What to report about a plugin that cannot take part."""
    message = f"{called(record)} cannot be used and is left out: {why}"
    return Problem(severity, message, _way_out(record), None, record.name)


def hook_fault(
    record: PluginRecord,
    hook: str,
    error: BaseException,
    severity: Literal["error", "warning"],
    consequence: str,
) -> Problem:
    """What to report when a plugin raises in a hook.

    Args:
        record: the plugin.
        hook, error: where and with what it failed.
        severity: how much it matters.
        consequence: what goes on without its answer, as a sentence without a full stop.
    """
    logger.debug("%s: %s", called(record), hook, exc_info=error)
    message = f"{called(record)} failed in hook {hook!r}: {explain(error)}. {consequence}"
    return Problem(severity, message, _way_out(record), None, record.name)


def called(record: PluginRecord) -> str:
    """A plugin as messages name it."""
    origin = f"{record.distribution} {record.version}".strip()
    return f"plugin {record.name!r} ({origin})" if origin else f"plugin {record.name!r}"


def _way_out(record: PluginRecord) -> str:
    block = f"block it with {block_flag(record.name)}"
    if not record.distribution or is_builtin(record.distribution):
        return block
    return f"update or uninstall {record.distribution}, or {block}"
