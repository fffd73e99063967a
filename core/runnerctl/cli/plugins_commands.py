"""The commands that plugins add: asked for only when they may be needed.

Loading plugins is cheap, but a command of ours needs none of theirs to be found. So
`register_commands` is called for `runnerctl --help`, for a command that is not ours and
for shell completion.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer.core import TyperGroup

from runnerctl.cli.guard import USERS_FAULT, guarded

if TYPE_CHECKING:
    from runnerctl.decision import PluginRecord
    from runnerctl.plugin_checks import Implementation
    from runnerctl.plugins import PluginHost
    from runnerctl.problems import Problem

HOOK = "register_commands"
_PLUGIN_FLAGS = ("-p", "--plugin")


class RootGroup(TyperGroup):
    """`runnerctl` itself: our commands, and below them those of plugins.

    A `-p` before the command's name holds for the plugins' commands, and is handed on to
    a command of ours that takes it.
    """

    _words: tuple[str, ...] = ()
    _loaded = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember the words as typed: `--help` is answered before options have values."""
        self._words = self._words or tuple(args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Ours, then those of plugins."""
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of ours, else one of a plugin."""
        if cmd_name not in self.commands and self._load():
            raise typer.Exit(USERS_FAULT)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Hand a `-p` that stands before the command's name on to the command."""
        name, command, rest = super().resolve_command(ctx, args)
        target: Any = command
        at = 0
        while at < len(rest) and rest[at] in getattr(target, "commands", {}):
            target, at = target.commands[rest[at]], at + 1
        if any(param.name == "plugins" for param in getattr(target, "params", ())):
            flags = [word for value in ctx.params.get("plugin") or () for word in ("-p", value)]
            rest = [*rest[:at], *flags, *rest[at:]]
        return name, command, rest

    def _load(self) -> bool:
        """Add the plugins' commands, once; True if a fault is an error (strict plugins)."""
        if self._loaded:
            return False
        self._loaded = True
        from runnerctl.resolve import discover_host

        host, _ = discover_host(source="command line", plugins=plugin_words(self._words) or None)
        commands, problems = plugin_commands(host, self.commands)
        self.commands.update(commands)
        if _is_completing():
            return False
        if problems:
            from runnerctl.cli.render import problem_list, show

            show(problem_list(problems), stderr=True)
        return any(problem.severity == "error" for problem in problems)


def plugin_words(words: Sequence[str]) -> list[str]:
    """The values of `-p` in a command line, read before its commands are known.

    Before the command's name every value counts. Behind it `-p` may be the command's own
    and mean a port: there only `no:NAME` does.
    """
    found: list[str] = []
    is_behind = False
    rest = iter(words)
    for word in rest:
        value: str | None = None
        if word == "--":
            break
        if word in _PLUGIN_FLAGS:
            value = next(rest, None)
        elif word.startswith("--plugin="):
            value = word.removeprefix("--plugin=")
        elif word.startswith("-p"):
            value = word.removeprefix("-p").removeprefix("=")
        elif not word.startswith("-"):
            is_behind = True
        if value and (not is_behind or value.strip().casefold().startswith("no:")):
            found.append(value)
    return found


def plugin_commands(
    host: PluginHost, ours: Collection[str]
) -> tuple[dict[str, Any], list[Problem]]:
    """The commands of all plugins by name, in name order, and what was wrong.

    Args:
        host: the plugins to ask.
        ours: names that are taken. Of two plugins with one name neither gets it, since
            which one is meant would be a guess.
    """
    from runnerctl.plugin_checks import PluginFaultError

    problems: list[Problem] = []
    claims: dict[str, list[tuple[PluginRecord, Any]]] = {}
    for record, implementation in host.implementations(HOOK):
        try:
            commands = _ask(implementation)
        except (Exception, SystemExit) as error:
            problems.append(_fault(host, record, error, "Its commands are left out"))
            continue
        for name, command in commands.items():
            claims.setdefault(name, []).append((record, command))
    accepted = {}
    for name, claimed in sorted(claims.items()):
        if name not in ours and len(claimed) == 1:
            accepted[name] = claimed[0][1]
            continue
        for record, _ in claimed:
            others = ["runnerctl itself"] if name in ours else []
            others += [f"plugin {other.name!r}" for other, _ in claimed if other is not record]
            clash = PluginFaultError(f"{' and '.join(others)} has a command {name!r} too")
            problems.append(_fault(host, record, clash, f"Its command {name!r} is left out"))
    return accepted, problems


def _ask(implementation: Implementation) -> Mapping[str, Any]:
    """The commands of one plugin, built: what typer cannot build fails here, not in `--help`."""
    from runnerctl.plugin_checks import PluginFaultError, short

    app = typer.Typer(rich_markup_mode=None)
    answer = implementation({"app": app})
    if answer is not None:
        raise PluginFaultError(f"must add commands to `app` and return None, not {short(answer)}")
    if app.registered_callback is not None:
        raise PluginFaultError("`app` must have no callback; give one to a group of your own")
    _guard(app)
    group = typer.main.get_group(app)
    commands: Mapping[str, Any] = group.commands
    if not commands:
        raise PluginFaultError("adds no command to `app`")
    return commands


def _guard(app: typer.Typer) -> None:
    """Give every command the exit codes of ours, and `--traceback`; help texts look like ours."""
    app.rich_markup_mode = None
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = guarded(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _guard(group.typer_instance)


def _fault(
    host: PluginHost, record: PluginRecord, error: BaseException, consequence: str
) -> Problem:
    from runnerctl.plugin_faults import hook_fault

    severity: Literal["error", "warning"] = "error" if host.strict else "warning"
    return hook_fault(record, HOOK, error, severity, consequence)


def _is_completing() -> bool:
    """Whether a shell asks, which would show an error in the middle of the line."""
    return "_RUNNERCTL_COMPLETE" in os.environ or sys.stderr is None
