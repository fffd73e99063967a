"""Fetching a checkpoint from the model hub: weights and text files, never pickles."""

from __future__ import annotations

from pathlib import Path

from runnerctl.errors import ModelError
from runnerctl.models.checkpoint import has_safetensors

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# Subfolders and consolidated files hold the same weights in other formats. Those that begin
# with a number are what sentence-transformers puts behind the model: 1_Pooling, 2_Dense.
_NOT = ["[!0-9]*/*", "consolidated*"]


def fetch_checkpoint(repo_id: str, *, with_code: bool = False) -> Path:
    """A local snapshot of a hub repository, from the hub's own cache where it is there.

    Args:
        repo_id: `owner/name`.
        with_code: also fetch Python files, for `trust_remote_code`.

    Raises:
        ModelError: unknown, gated, not reachable.
    """
    from huggingface_hub import snapshot_download

    from runnerctl.config.hub import CONNECT_SECONDS

    try:
        folder = snapshot_download(
            repo_id,
            allow_patterns=[*_FILES, *(["*.py"] if with_code else [])],
            ignore_patterns=_NOT,
            etag_timeout=CONNECT_SECONDS,
        )
    except Exception as error:  # the hub, the network, proxies: each with errors of its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{repo_id} could not be fetched from the hub: {reason[0]}",
            remedy="check the name and the network (a gated model needs `hf auth login`), "
            "or give a local folder",
        ) from error
    # Without a network the hub's client is content with whatever the cache has.
    if not has_safetensors(Path(folder)):
        raise ModelError(
            f"{repo_id} has no safetensors weights on the hub, or the hub cannot be reached and "
            "they are not in its local cache",
            remedy="take a model with safetensors, or check the network",
        )
    return Path(folder)
