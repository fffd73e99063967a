"""One file of a model on the hub: from the local cache, then from the network."""

from __future__ import annotations

import os
import socket
import threading
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from runnerctl.errors import ModelError

CONNECT_SECONDS = 4.0
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
REMEDY = "give a local folder with a config.json, or a named model such as smollm2-135m"


def is_cached(model: str, file: str) -> bool:
    """Whether a file of a hub model is in the local cache."""
    try:
        hub: Any = import_module("huggingface_hub")
    except ImportError:
        return False
    return isinstance(hub.try_to_load_from_cache(model, file), str)


def fetch_from_hub(model: str, file: str) -> Path:
    """The path of a file of a hub model, fetched if it is not in the local cache.

    `HF_HUB_OFFLINE=1` keeps it to the cache. Without a network it gives up after
    a few seconds.

    Args:
        model: `org/name`.
        file: the file's name in the model's repository.

    Raises:
        ModelError: it is in neither place, or `huggingface_hub` is not installed.
    """
    try:
        hub: Any = import_module("huggingface_hub")
        constants: Any = import_module("huggingface_hub.constants")
    except ImportError:
        raise ModelError(
            f"{model} is no local folder; to look it up on the hub, huggingface_hub is needed",
            remedy=f"pip install 'runnerctl[engine]', or {REMEDY}",
        ) from None
    cached = hub.try_to_load_from_cache(model, file)
    if isinstance(cached, str):
        return Path(cached)
    tried = f"{model} is no local folder, and its {file} is not in the local hub cache"
    offline = next((name for name in OFFLINE_VARIABLES if _is_on(os.environ.get(name))), None)
    if offline:
        raise ModelError(
            f"{tried}; the network was not tried because {offline} is set",
            remedy=f"unset {offline}, or {REMEDY}",
        )
    endpoint = str(constants.ENDPOINT)
    if not _answers(endpoint):
        raise ModelError(f"{tried}; {_host(endpoint)[0]} cannot be reached", remedy=REMEDY)
    try:
        return Path(hub.hf_hub_download(model, file, etag_timeout=CONNECT_SECONDS))
    except Exception as exc:
        raise ModelError(f"{tried}; {_reason(exc, model, file)}", remedy=REMEDY) from exc


def _is_on(value: str | None) -> bool:
    return (value or "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def _host(endpoint: str) -> tuple[str, int]:
    parts = urlsplit(endpoint)
    return parts.hostname or endpoint, parts.port or (80 if parts.scheme == "http" else 443)


def _answers(endpoint: str) -> bool:
    """Whether a connection can be made at all.

    The hub's client retries for half a minute without a network. Looking up a
    name has no time limit of its own, hence the thread. Behind a proxy nothing
    can be told this way.
    """
    if getproxies().keys() & {"http", "https", "all"}:
        return True
    reached = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(_host(endpoint), timeout=CONNECT_SECONDS).close()
        except OSError:
            return
        reached.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    return reached.is_set()


def _reason(exc: Exception, model: str, file: str) -> str:
    reasons = {
        "GatedRepoError": f"{model} is on the hub, but this account has no access to it",
        "RepositoryNotFoundError": f"the hub has no public model called {model}",
        "RemoteEntryNotFoundError": f"{model} is on the hub, but has no {file}",
        "LocalEntryNotFoundError": "the connection to the hub failed",
    }
    for kind in type(exc).__mro__:
        if kind.__name__ in reasons:
            return reasons[kind.__name__]
    lines = str(exc).strip().splitlines()
    return f"the hub said: {lines[0]}" if lines else f"the hub failed: {type(exc).__name__}"
