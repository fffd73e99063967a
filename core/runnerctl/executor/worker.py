"""One rank: the plugins, the groups and the runner of a process that is not the engine's."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runnerctl.config import EngineConfig
from runnerctl.decision import Decision, PluginRecord
from runnerctl.errors import ModelError, PluginError
from runnerctl.executor.answers import Failure, Returned
from runnerctl.executor.make_runner import make_runner
from runnerctl.parallel import Place
from runnerctl.plugins import PluginHost

if TYPE_CHECKING:
    from runnerctl.runner.protocol import KVCacheSpec, LoadedModel
    from runnerctl.runner.rank_groups import RankGroups
    from runnerctl.runner.step import StepHandle, StepPlan


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a rank is made from; the same for all but for its place.

    Attributes:
        config, decision, model_path: as in `WorkerContext`.
        place: of this rank.
        device_index: of its GPU, where there are GPUs.
        ranks_here: how many ranks share this machine's main memory and cores.
    """

    config: EngineConfig
    decision: Decision
    model_path: Path
    place: Place
    device_index: int
    ranks_here: int


class Worker:
    """Calls from the engine come here, in the order in which they were made.

    Raises:
        PluginError: the plugins of this process are not those that the decision was made with.
    """

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        self._host = _same_plugins(start)
        self._groups: RankGroups | None = None

    def open_store(self, host: str | None) -> tuple[str, int] | None:
        """On the first rank: open the store where all meet; returns where it is."""
        if self._start.place.rank != 0:
            return None
        from runnerctl.runner.rank_groups import open_store

        host = host or "127.0.0.1"
        self._store, port = open_store(host, self._start.config.parallel.worker_timeout)
        return host, port

    def join(self, host: str, port: int) -> None:
        """Meet the other ranks at the store."""
        from runnerctl.runner.memory import default_device
        from runnerctl.runner.rank_groups import join_groups

        self._use_device()
        timeout = self._start.config.parallel.worker_timeout
        self._groups = join_groups(self._start.place, host, port, default_device(), timeout)

    def load(self) -> tuple[LoadedModel, KVCacheSpec]:
        """Make the runner and load the model."""
        from runnerctl.runner.memory import default_device
        from runnerctl.runner.protocol import WorkerContext

        self._use_device()
        start = self._start
        assert start.decision.runner is not None  # or there would have been no start
        if not start.model_path.exists():
            raise ModelError(
                f"{start.model_path} is not there on {socket.gethostname()}, where rank "
                f"{start.place.rank} runs",
                remedy="have the model at the same path on every machine",
            )
        context = WorkerContext(
            start.config, start.decision, start.model_path, self._host, start.place, self._groups
        )
        self._runner = make_runner(self._host.runners[start.decision.runner], context)
        model, spec = self._runner.load(), self._runner.kv_cache_spec()
        if default_device().type == "cpu":
            # Each rank counts the memory of the whole machine.
            free = spec.free_bytes
            spec = replace(
                spec,
                available_bytes=spec.available_bytes // start.ranks_here,
                free_bytes=None if free is None else free // start.ranks_here,
            )
        return model, spec

    def start(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the cache and warm up."""
        self._runner.initialize_kv_cache(num_blocks, max_model_len)
        self._runner.warm_up()

    def execute(self, plan: StepPlan) -> StepHandle:
        """Submit a step."""
        return self._runner.execute(plan)

    def shutdown(self) -> None:
        """Free what the runner holds, and leave the groups."""
        from runnerctl.runner.rank_groups import leave_groups

        if hasattr(self, "_runner"):
            self._runner.shutdown()
        leave_groups()

    def _use_device(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(self._start.device_index)
            # where transformers looks for it
            os.environ["LOCAL_RANK"] = str(self._start.device_index)


class Calls:
    """The calls of an engine to a worker, which is made with the first of them.

    For whatever brings the calls: nothing is raised here, errors are answers.
    """

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        self._worker: Worker | None = None

    def make(self, method: str, arguments: tuple[Any, ...]) -> Returned | Failure | StepHandle:
        """Call a method of the worker. A step may still run when this returns."""
        try:
            if method == "shutdown" and self._worker is None:
                return Returned(None)
            self._worker = self._worker or Worker(self._start)
            outcome = getattr(self._worker, method)(*arguments)
        except BaseException as error:  # all of it is the engine's to know
            return Failure.of(error)
        handle: StepHandle = outcome
        return handle if method == "execute" else Returned(outcome)

    def settle(self, outcome: Returned | Failure | StepHandle) -> Returned | Failure:
        """What came of a call, waiting for it if it is a step."""
        if isinstance(outcome, Returned | Failure):
            return outcome
        try:
            return Returned(outcome.result())
        except BaseException as error:  # whatever the step raised
            return Failure.of(error)


def set_threads(ranks_here: int) -> None:
    """Share this machine's cores among the ranks on it, before torch is imported.

    A number of threads that the user set is left alone.
    """
    if ranks_here > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // ranks_here)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _same_plugins(start: WorkerStart) -> PluginHost:
    """The plugins of this process.

    Raises:
        PluginError: they differ from the decision's; names both sides of each difference.
    """
    config, wishes = start.config, start.config.plugins
    host = PluginHost.discover(
        plugins=wishes.plugins,
        allowed=wishes.allowed_plugins,
        strict=wishes.strict_plugins,
        plugins_setting=config.where("plugins"),
        allowed_setting=config.where("allowed_plugins"),
    )
    if differences := plugin_differences(start.decision.plugins, host.records):
        raise PluginError(
            f"the plugins of rank {start.place.rank} on {socket.gethostname()} are not those that "
            f"the decision was made with: {'; '.join(differences)}",
            remedy="install the same plugins, in the same versions, wherever a rank runs; a plugin "
            "that was registered from code is in one process only",
        )
    return host


def plugin_differences(decided: Sequence[PluginRecord], found: Sequence[PluginRecord]) -> list[str]:
    """In words, each plugin that is not the same on both sides.

    What an error says may differ from one process to another (a path, say), so it is not
    compared; that there is one is.
    """
    sides = [
        {(r.name, r.distribution): f"{r.status}, {r.distribution} {r.version}" for r in records}
        for records in (decided, found)
    ]
    there, here = sides
    return [
        f"{key[0]!r} was {there.get(key, 'not installed')} where the decision was made, and is "
        f"{here.get(key, 'not installed')} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
