"""`runnerctl env`: what a report of a problem should begin with."""

from __future__ import annotations

import json
import platform
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runnerctl import __version__
from runnerctl.cli.flags import Format

if TYPE_CHECKING:
    from runnerctl.plugins import PluginHost


def show_environment(
    settings: dict[str, Any],
    config_file: Path | None,
    output: Annotated[
        Format, typer.Option("--format", metavar="table|json", help="A table to read, or JSON.")
    ] = Format.table,
) -> None:
    """Show versions, processor, memory, GPUs, and what each attention backend says.

    A package that is broken is reported in its row.
    """
    found = environment(settings, config_file)
    if output is Format.json:
        print(json.dumps(found, indent=2))
    else:
        _show_table(found)


def environment(settings: dict[str, Any], config_file: Path | None) -> dict[str, Any]:
    """What there is, by topic. Where a probe failed, `{"error": why}` stands in its place."""
    from runnerctl.cli import env_probes as probes
    from runnerctl.models.cache import cache_dir
    from runnerctl.resolve import discover_host

    @cache
    def host() -> PluginHost:
        return discover_host(source="command line", config_file=config_file, **settings)[0]

    def plugins() -> list[dict[str, Any]]:
        return [
            {"name": r.name, "version": f"{r.distribution} {r.version}".strip(), "status": r.status}
            | ({"error": r.error} if r.error else {})
            for r in host().records
        ]

    def attention() -> dict[str, Any]:
        return probes.attention(host().attention_backends)

    has_torch = probes.package("torch") is not None
    needs_torch = {"error": "torch is not installed"}
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "runnerctl": __version__,
        "packages": {name: probes.ask(partial(probes.package, name)) for name in probes.PACKAGES},
        "plugins": probes.ask(plugins),
        "cpu": probes.cpu(),
        "memory": probes.ask(probes.memory),
        "gpus": probes.ask(probes.gpus),
        "ranks": probes.ask(probes.ranks) if has_torch else needs_torch,
        "dtype": probes.ask(probes.dtype) if has_torch else needs_torch,
        "attention": probes.ask(attention) if has_torch else needs_torch,
        "cache_dir": probes.ask(lambda: str(cache_dir())),
    }


def _show_table(found: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from runnerctl.cli.render import show

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value, is_wrong in _rows(found):
        table.add_row(Text(name, "bold"), Text(value, "bold red" if is_wrong else ""))
    show(table)


def _rows(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Name, text, and whether the text is a fault."""
    rows = [(name, found[name], False) for name in ("system", "python", "runnerctl")]
    for name, package in found["packages"].items():
        text = "not installed" if package is None else package.get("version", "")
        rows.append((name, *_with_fault(text, package)))
    rows += _many(
        "plugin", found["plugins"], lambda p: f"{p['name']}, {p['status']} ({p['version']})"
    )
    cpu = found["cpu"]
    rows.append(("cpu", *_plain(cpu["model"])))
    rows.append(("cores usable", *_plain(cpu["cores"])))
    rows.append(("instruction sets", *_plain(cpu["instructions"])))
    rows.append(("memory", *_memory(found["memory"])))
    rows += _many(
        "gpu",
        found["gpus"],
        lambda g: f"{g['name']}, {_gib(g['memory'])}, compute capability {g['compute_capability']}",
    )
    rows.append(("ranks", *_ranks(found["ranks"])))
    dtype = found["dtype"]
    text = (
        "" if "error" in dtype else f"{dtype['auto']} for a bfloat16 checkpoint: {dtype['reason']}"
    )
    rows.append(("dtype auto", *_with_fault(text, dtype)))
    attention = found["attention"]
    if "error" in attention:
        rows.append(("attention", *_with_fault("", attention)))
    else:
        rows += [
            (f"attention {name}", *_plain("serves a usual layer" if why is None else why))
            for name, why in attention.items()
        ]
    rows.append(("cache", *_plain(found["cache_dir"])))
    return rows


def _many(name: str, items: Any, describe: Any) -> list[tuple[str, str, bool]]:
    if isinstance(items, dict) or not items:
        return [(name, *_plain(items or "none"))]
    return [(name, *_with_fault(describe(item), item)) for item in items]


def _plain(value: Any) -> tuple[str, bool]:
    if isinstance(value, dict):
        return _with_fault("", value)
    return (", ".join(value) or "none") if isinstance(value, list) else str(value), False


def _with_fault(text: str, item: Any) -> tuple[str, bool]:
    error = item.get("error") if isinstance(item, dict) else None
    if error is None:
        return text, False
    return f"{text}: {error}" if text else error, item.get("status") != "blocked"


def _memory(found: dict[str, Any]) -> tuple[str, bool]:
    if "error" in found:
        return _plain(found)
    text = f"{_gib(found['total'])}, {_gib(found['available'])} available"
    return text + (f", limited to {_gib(found['limit'])}" if "limit" in found else ""), False


def _ranks(found: dict[str, Any]) -> tuple[str, bool]:
    """How many ranks one engine can have here, and over what."""
    if "error" in found:
        return _plain(found)
    if found["exchange"] is None:
        return "this build of torch has no process groups: one rank only", False
    room, device = found["room"], found["device"]
    text = f"one per {device}, {room} here ({found['exchange']})"
    if device != "GPU":
        text += "; more share them"
    return f"{text}; ray {found['ray'] or 'is not installed'}", False


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
