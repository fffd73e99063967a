"""Settings for the whole suite."""

import os
from pathlib import Path

import pytest

# transformers warns about every reference run that switches the end token off
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, fetched into the user's cache once and shared by all runs."""
    from runnerctl.models.store import ensure_local

    return ensure_local("smollm2-135m")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The named embedding model, fetched into the user's cache once and shared by all runs."""
    from runnerctl.models.store import ensure_local

    return ensure_local("all-minilm-l6-v2")
