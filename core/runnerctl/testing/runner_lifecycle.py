"""What a runner keeps and what it lets go of: finished requests, memory, threads, processes."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import types
import weakref
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from runnerctl.errors import UserError
from runnerctl.testing.parity import greedy, make_prompts
from runnerctl.testing.runner_under_test import RunnerUnderTest
from runnerctl.testing.scripted import ScriptedRunner

# A cache that outweighs the tiny model and everything around it.
MANY_BLOCKS = 4096
GRACE_S = 10.0
# Ways out of the runner, into the rest of the process.
_ELSEWHERE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    threading.Thread,
)


class LifecycleContract(RunnerUnderTest):
    """Part of `RunnerConformance`: leaks."""

    def test_it_keeps_nothing_of_finished_requests(self, tiny_model: Path) -> None:
        """However many have come and gone; looked for in all that the runner refers to."""
        script = self._scripted(tiny_model)
        try:
            sizes = []
            for round_ in range(4):
                for i in range(8):
                    _serve(script, [f"leak-test-{round_}-{i}-{part}" for part in "ab"])
                script.step({})
                sizes.append(_reach(script.runner))
            kept = sorted(name for name in sizes[-1].strings if name.startswith("leak-test-"))
            assert not kept, f"{len(kept)} finished requests are still in the runner: {kept[:4]}"
            # the first round may fill what is kept for good
            grown = sizes[-1].count - sizes[1].count
            assert grown < 16, f"32 more requests left {grown} more objects in the runner"
        finally:
            script.close()

    def test_shutdown_frees_memory(self, tiny_model: Path) -> None:
        """The cache and the weights, even while somebody still holds the runner; then that too."""
        before = _tensor_bytes()
        script = self._scripted(tiny_model, num_blocks=MANY_BLOCKS)
        script.add("a", [5, 6, 7], greedy(3))
        script.run()
        taken = _tensor_bytes() - before
        script.close()
        left = _tensor_bytes() - before
        assert left <= taken * 0.05, f"of {taken:,} bytes, {left:,} are left after shutdown"
        runner = weakref.ref(script.runner)
        del script
        gc.collect()
        assert runner() is None, "something still refers to the runner after its shutdown"

    def test_shutdown_ends_threads_and_processes(self, tiny_model: Path) -> None:
        """What libraries start once may stay; what comes with every runner may not."""
        left = []
        for _ in range(3):
            script = self._scripted(tiny_model)
            script.add("a", [5, 6, 7], greedy(3))
            script.run()
            script.close()
            left.append((script, _alive()))
        first = left[0][1]
        deadline = time.monotonic() + GRACE_S
        while len(now := _alive()) > len(first) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(now) <= len(first), f"left running by two more runners: {now - first}"

    def test_a_failed_load_says_why_and_can_be_shut_down(
        self, tiny_model: Path, tmp_path: Path
    ) -> None:
        """A checkpoint without weights is the user's to put right; nothing stays behind."""
        shutil.copy(tiny_model / "config.json", tmp_path)
        before, alive = _tensor_bytes(), _alive()
        runner = self._unloaded(tmp_path)
        with pytest.raises(UserError) as caught:
            runner.load()
        assert str(caught.value).strip()
        runner.shutdown()
        # the traceback holds what load was at
        del caught
        assert _tensor_bytes() - before < 4096
        deadline = time.monotonic() + GRACE_S
        while (now := _alive() - alive) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not now, f"left running by a failed load: {now}"

    @pytest.mark.parametrize("after", ["construction", "load", "initialize_kv_cache"])
    def test_shutdown_at_any_stage_of_the_start(self, tiny_model: Path, after: str) -> None:
        """The cache may be refused after the load; shutdown is called all the same."""
        runner = self._unloaded(tiny_model)
        if after != "construction":
            loaded = runner.load()
            assert loaded.vocab_size > 0
            assert runner.kv_cache_spec().available_bytes > 0
        if after == "initialize_kv_cache":
            runner.initialize_kv_cache(8, 16)
        runner.shutdown()


def _serve(script: ScriptedRunner, names: Iterable[str]) -> None:
    """Requests that come, are preempted once, and go."""
    for name, prompt in zip(names, make_prompts((5, 6)), strict=True):
        script.add(name, prompt, greedy(4))
    script.step()
    script.preempt(next(iter(script.requests)))
    script.step()
    script.run()
    script.finish(*list(script.requests))


class _reach:  # noqa: N801 - a measurement, read like a function
    """What can be reached from an object without leaving it for modules, classes and threads.

    Attributes:
        count: objects reached.
        strings: the strings among them.
    """

    def __init__(self, root: object) -> None:
        gc.collect()
        self.strings: set[str] = set()
        seen: dict[int, object] = {}
        pending = [root]
        while pending:
            thing = pending.pop()
            if id(thing) in seen or issubclass(type(thing), _ELSEWHERE):
                continue
            seen[id(thing)] = thing
            if type(thing) is str:
                self.strings.add(thing)
            pending += gc.get_referents(thing)
        self.count = len(seen)


def _tensor_bytes() -> int:
    """Memory of all tensors that Python knows, each storage once."""
    gc.collect()
    # not isinstance: it would ask lazy modules for their __class__
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = {}
    for tensor in tensors:
        has_data = tensor.layout is torch.strided and tensor.device.type != "meta"
        if has_data and not isinstance(tensor, FakeTensor):  # the compiler's, without memory
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _alive() -> set[str]:
    """Threads and child processes of this process."""
    threads = {f"thread {t.name} ({t.ident})" for t in threading.enumerate()}
    children = psutil.Process().children(recursive=True)
    return threads | {f"process {child.pid}" for child in children}
