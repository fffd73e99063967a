"""Ranks that are actors of a Ray cluster: on this machine, or on as many as the cluster has.

The cluster is the one that this process uses already, else the one that `RAY_ADDRESS` names
or that was started on this machine, else a local one that is started here and ended with the
last engine that uses it. Ray carries calls and answers; tensors go from rank to rank beside it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

from runnerctl.errors import UserError, WorkerError
from runnerctl.executor.answers import Failure, Returned
from runnerctl.executor.capacity import too_many_ranks
from runnerctl.executor.ray_actor import RankActor, Whereabouts
from runnerctl.executor.worker import WorkerStart
from runnerctl.parallel import ParallelLayout
from runnerctl.runner.protocol import WorkerContext

_PLACEMENT_S = 30
_PING_EVERY_S = 1.0
_LET_GO_S = 5.0
_SHARE_OF_A_CPU = 0.01


class RayRanks:
    """See `Ranks` and the module's docstring.

    Args:
        context: what the workers' own are made from.
        layout: of the ranks.

    Raises:
        UserError: Ray is not installed, or its cluster has no room for the ranks.
        WorkerError: an actor ended at once.
    """

    host: str | None

    def __init__(self, context: WorkerContext, layout: ParallelLayout) -> None:
        self.size = layout.world_size
        self._timeout_s = context.config.parallel.worker_timeout
        self._ray: Any = _import_ray(context)
        self._cluster = _Cluster(self._ray, self.size)
        self._group: Any = None
        self._actors: list[_Actor] = []
        try:
            bundle = _bundle(self._ray, self._cluster, context, layout)
            self._group = self._place([bundle] * self.size)
            options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
            self._actors = [
                _Actor(self._ray, rank, self._group, options) for rank in range(self.size)
            ]
            self._begin(context, layout)
        except BaseException:
            self.end(kindly=False)
            raise

    def send(self, method: str, *arguments: Any) -> None:
        """See `Ranks.send`; an actor that has ended is noticed by `receive`."""
        for actor in self._actors:
            actor.call(method, arguments)

    def receive(self) -> list[Any]:
        """See `Ranks.receive`."""
        for actor in self._actors:
            actor.ask()
        while late := [actor for actor in self._actors if actor.answer is None]:
            self._ray.wait([actor.asked for actor in late], timeout=_PING_EVERY_S)
            for actor in late:
                actor.look(self._timeout_s)
            self._look_for_failures()
        answers = [actor.take() for actor in self._actors]
        return [answer.value for answer in answers if isinstance(answer, Returned)]

    def end(self, *, kindly: bool) -> None:
        """See `Ranks.end`. A cluster that was there before is left as it was."""
        actors, self._actors = self._actors, []
        with suppress(Exception):  # a cluster that is gone has no actors to end
            if kindly:
                for actor in actors:
                    actor.call("shutdown", ())
                done = [actor.handle.take.remote() for actor in actors]
                self._ray.wait(done, num_returns=len(done), timeout=_LET_GO_S)
            for actor in actors:
                self._ray.kill(actor.handle, no_restart=True)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._group = None
        self._cluster.leave()

    def _place(self, bundles: list[dict[str, float]]) -> Any:
        """Room for every rank, as close together as can be."""
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        if not group.wait(_PLACEMENT_S):
            self._ray.util.remove_placement_group(group)
            free = self._ray.available_resources()
            found = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in bundles[0])
            raise UserError(
                f"the Ray cluster could not place {len(bundles)} ranks within {_PLACEMENT_S} "
                f"seconds: {found} are free",
                remedy="end what uses the cluster, or add machines to it",
            )
        return group

    def _begin(self, context: WorkerContext, layout: ParallelLayout) -> None:
        """Tell each actor its place, and how many others there are on its machine."""
        places: list[Whereabouts] = []
        for actor in self._actors:
            actor.asked = actor.handle.where.remote()
            places.append(actor.fetch(self._timeout_s))
        self.host = places[0].address
        nodes = [place.node for place in places]
        threads = os.environ.get("OMP_NUM_THREADS")
        for actor, place, where in zip(self._actors, layout.places(), places, strict=True):
            actor.where = where
            start = WorkerStart(
                context.config,
                context.decision,
                context.model_path,
                place,
                device_index=0,  # Ray shows each actor its own GPU only
                ranks_here=nodes.count(where.node),
            )
            actor.asked = actor.handle.begin.remote(start, threads)
            actor.fetch(self._timeout_s)

    def _look_for_failures(self) -> None:
        """Raise the first failure, or what it comes from: others fail when a rank is gone."""
        for actor in self._actors:
            if isinstance(actor.answer, Failure):
                error = actor.answer.to_error(actor.rank)
                if isinstance(error, WorkerError):
                    for other in self._actors:
                        other.check_alive()
                raise error


class _Actor:
    """One rank's actor, and what was asked of it last."""

    def __init__(self, ray: Any, rank: int, group: Any, options: dict[str, float]) -> None:
        self._ray = ray
        self.rank = rank
        self.where: Whereabouts | None = None
        self.asked: Any = None
        self.answer: Returned | Failure | None = None
        self._heard_at = 0.0
        self._ping: Any = None
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=rank
        )
        # Signs of life have a thread of their own; calls are made one after the other.
        actor = ray.remote(concurrency_groups={"signs": 1})(RankActor)
        self.handle: Any = actor.options(
            scheduling_strategy=strategy, max_restarts=0, **options
        ).remote()
        # Nothing comes back from the call itself: that halves what Ray has to keep track of.
        self._call = self.handle.call.options(num_returns=0)

    def __str__(self) -> str:
        where = f" (process {self.where.pid} on {self.where.host})" if self.where else ""
        return f"rank {self.rank}{where}"

    def call(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Have the worker's method called; what comes of it is asked for later."""
        self._call.remote(method, arguments)

    def ask(self) -> None:
        """Ask for the oldest answer, unless that was done and an interrupt came between."""
        if self.asked is None:
            self.asked = self.handle.take.remote()
            self.answer = None
            self._heard_at = time.monotonic()
            self._ping = None

    def look(self, timeout_s: float) -> None:
        """Take the answer if it is there; else ask for a sign of life."""
        if self._is_there(self.asked):
            self.answer = self._get(self.asked)
            return
        now = time.monotonic()
        if self._ping is not None and self._is_there(self._ping):
            self._get(self._ping)
            self._ping, self._heard_at = None, now
        if now - self._heard_at > timeout_s:
            raise WorkerError(
                f"{self} has given no sign of life for {timeout_s} seconds",
                rank=self.rank,
                details="It is stopped, or its machine is overloaded or out of reach.",
            )
        if self._ping is None:
            self._ping = self.handle.ping.options(concurrency_group="signs").remote()

    def take(self) -> Returned | Failure:
        """The answer; the next `ask` is about the next one."""
        answer, self.answer, self.asked = self.answer, None, None
        assert answer is not None
        return answer

    def fetch(self, timeout_s: float) -> Any:
        """What was asked for, waiting for it."""
        asked, self.asked = self.asked, None
        ready, _ = self._ray.wait([asked], timeout=timeout_s)
        if not ready:
            raise WorkerError(f"{self} did not start within {timeout_s} seconds", rank=self.rank)
        return self._get(asked)

    def check_alive(self) -> None:
        """Raise WorkerError if the actor has ended, or does so in a moment."""
        ping = self.handle.ping.options(concurrency_group="signs").remote()
        if self._ray.wait([ping], timeout=_PING_EVERY_S)[0]:
            self._get(ping)

    def _is_there(self, asked: Any) -> bool:
        return bool(self._ray.wait([asked], timeout=0)[0])

    def _get(self, asked: Any) -> Any:
        try:
            return self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise WorkerError(
                f"{self} has ended: {first}", rank=self.rank, details=str(error)
            ) from None


class _Cluster:
    """The use of a Ray cluster; one that is started here ends with its last user.

    Attributes:
        is_local: it was started here, for the engines of this process alone.
    """

    _lock = threading.Lock()
    _users = 0
    _entered_here = False
    is_local = False

    def __init__(self, ray: Any, num_ranks: int) -> None:
        self._ray = ray
        self._left = False
        with _Cluster._lock:
            if not ray.is_initialized():
                _Cluster._users = 0
                _Cluster.is_local = _enter(ray, num_ranks)
                _Cluster._entered_here = True
            _Cluster._users += 1

    def leave(self) -> None:
        """Doing it again changes nothing."""
        with _Cluster._lock:
            if self._left:
                return
            self._left = True
            _Cluster._users -= 1
            if not _Cluster._users and _Cluster._entered_here:
                _Cluster._entered_here = _Cluster.is_local = False
                self._ray.shutdown()


def _enter(ray: Any, num_ranks: int) -> bool:
    """Connect to the cluster that is there, or start one; True if it was started."""
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **quiet)
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise UserError(
                f"there is no Ray cluster at {address}: {error}",
                remedy="start one with ray start --head, or unset RAY_ADDRESS; one that wants a "
                "token needs RAY_AUTH_MODE=token",
                setting="RAY_ADDRESS",
            ) from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cores = max(num_ranks, len(os.sched_getaffinity(0)))
        ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
        return True
    return False


def _bundle(
    ray: Any, cluster: _Cluster, context: WorkerContext, layout: ParallelLayout
) -> dict[str, float]:
    """What one rank takes of the cluster: a GPU where there are any, else a CPU.

    Ranks on the CPUs of a cluster of our own share them, as those of `mp` do.

    Raises:
        UserError: there are fewer of them than ranks.
    """
    resources = ray.cluster_resources()
    kind = "GPU" if resources.get("GPU") else "CPU"
    if cluster.is_local and kind == "CPU":
        return {"CPU": _SHARE_OF_A_CPU}
    count = int(resources.get(kind, 0))
    if count < layout.world_size:
        there_is = f"the Ray cluster has {count} {kind}s"
        raise too_many_ranks(context.config, layout, there_is)
    return {kind: 1.0}


def _import_ray(context: WorkerContext) -> Any:
    try:
        ray = import_module("ray")
        import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        where = context.config.where("distributed_executor_backend")
        raise UserError(
            f"{where} ray needs Ray, which does not import here: {error}",
            remedy="pip install 'runnerctl[ray]', or use mp, which needs nothing more",
            setting=where,
        ) from error
    return ray
