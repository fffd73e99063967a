"""What the parts of `RunnerConformance` share: the runner that is tested, and how to start it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from runnerctl.resolve import Resolved
from runnerctl.runner.protocol import ModelRunner
from runnerctl.runner.spec import RunnerSpec
from runnerctl.testing.scripted import NUM_BLOCKS, ScriptedRunner, make_runner, resolve_for


class RunnerUnderTest:
    """Part of `RunnerConformance`, which says what the attributes mean."""

    spec: ClassVar[RunnerSpec]
    settings: ClassVar[Mapping[str, Any]] = {}
    plugins: ClassVar[Iterable[object]] = ()

    def _resolved(self, folder: Path, **settings: Any) -> Resolved:
        """What `LLM` starts from."""
        return resolve_for(self.spec, folder, {**self.settings, **settings}, self.plugins)

    def _unloaded(self, folder: Path) -> ModelRunner:
        """A runner that has not loaded anything yet."""
        return make_runner(self._resolved(folder))

    def _scripted(self, folder: Path, *, num_blocks: int = NUM_BLOCKS) -> ScriptedRunner:
        """A started runner and its books; the caller closes it."""
        return ScriptedRunner(
            self.spec, folder, self.settings, plugins=self.plugins, num_blocks=num_blocks
        )
