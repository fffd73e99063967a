"""Whether what the `engine` extra brings is installed here."""

from __future__ import annotations

from importlib.util import find_spec

from runnerctl.errors import UserError

ENGINE_MODULES = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "psutil")


def check_engine_installed() -> None:
    """Ask before anything is imported or fetched, which would be in vain.

    Raises:
        UserError: modules are missing; says what to install.
    """
    missing = [name for name in ENGINE_MODULES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"running a model needs {', '.join(missing)}, not installed here",
            remedy="pip install 'runnerctl[engine]'",
        )
