"""What the shell offers for the value of a flag. Called on every Tab: quick, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path


def completer(setting: str, choices: Iterable[str]) -> Callable[[str], list[str]] | None:
    """What completes the flag of a setting; None if nothing does."""
    special = {"runner": runners, "attention_backend": _backends}
    if setting in special:
        return special[setting]
    if setting in ("plugins", "allowed_plugins"):
        return plugins if setting == "plugins" else plugin_names
    words = tuple(choices)
    return (lambda incomplete: _starting(incomplete, words)) if words else None


def runners(incomplete: str) -> list[str]:
    """`auto` and the runners of all installed plugins."""
    from runnerctl.resolve import discover_host

    host, _ = discover_host()
    return _starting(incomplete, ["auto", *host.runners])


def plugins(incomplete: str) -> list[str]:
    """Installed plugins, and `no:` before each once the word begins like that."""
    names = plugin_names("")
    blocked = [f"no:{name}" for name in names]
    return _starting(incomplete, [*names, *(blocked if incomplete else ["no:"])])


def models(incomplete: str) -> list[str]:
    """Named models and what the hub's cache has; the shell itself offers files if none fits."""
    from runnerctl.config.model_reference import named_models

    return _starting(incomplete, [*named_models(), *_hub_models()])


def rows(incomplete: str) -> list[str]:
    """The model types that `matrix` knows by name, then models."""
    from runnerctl.matrix import families

    return [*_starting(incomplete, families()), *models(incomplete)]


def cached(incomplete: str) -> list[str]:
    """The models in our cache."""
    from runnerctl.models.inventory import own_models

    return _starting(incomplete, [entry.name for entry in own_models()])


def plugin_names(incomplete: str) -> list[str]:
    """Installed plugins, none of them imported."""
    from runnerctl.plugin_discovery import installed

    return _starting(incomplete, [candidate.name for candidate in installed()])


def _backends(incomplete: str) -> list[str]:
    from runnerctl.resolve import discover_host

    host, _ = discover_host()
    return _starting(incomplete, ["auto", *host.attention_backends])


def _hub_models() -> list[str]:
    """Hub ids by the folders of the hub's cache, whose client takes long to import."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    folder = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    try:
        found = [entry.name for entry in folder.iterdir() if entry.name.startswith("models--")]
    except OSError:
        return []
    return sorted(name.removeprefix("models--").replace("--", "/", 1) for name in found)


def _starting(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
