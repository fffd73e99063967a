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


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """`tiny_folders(family)`: a random checkpoint of a family, made once for the whole run."""
    from tiny_models import make_tiny_model

    made = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder
