"""From the name of a runner's factory to the runner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from runnerctl.errors import PluginError

if TYPE_CHECKING:
    from runnerctl.runner.protocol import ModelRunner, WorkerContext
    from runnerctl.runner.spec import RunnerSpec


def make_runner(spec: RunnerSpec, context: WorkerContext) -> ModelRunner:
    """The runner of this process.

    Raises:
        PluginError: the factory that its plugin named cannot be imported.
    """
    module, _, attribute = spec.factory.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"runner {spec.name!r} cannot be made: {spec.factory} does not import ({error})",
            remedy="install what it needs (runnerctl[engine]) or choose another --runner",
        ) from error
    runner: ModelRunner = factory(context)
    return runner
