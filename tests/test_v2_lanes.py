"""Where V2's steps run: submitted at once, in order, on one thread, each with its own outcome."""

import threading
from concurrent.futures import Future

import pytest
import torch

from runnerctl import LLM, SamplingParams
from runnerctl_runner_v2.lanes import ThreadLane, _FutureStep
from runnerctl_runner_v2.step_output import StepOutput
from tiny_models import make_tiny_model


@pytest.fixture
def lane():
    lane = ThreadLane()
    yield lane
    lane.close()


def test_steps_are_submitted_before_earlier_ones_are_done_and_run_in_order(lane):
    gate, log = threading.Event(), []

    def step(number):
        def run():
            gate.wait(timeout=60)
            log.append(f"ran {number}")
            return StepOutput(number)

        return run

    handles = []
    for number in range(3):
        handles.append(lane.launch(step(number)))
        log.append(f"submitted {number}")
    gate.set()
    assert [handle.result().step_id for handle in handles] == [0, 1, 2]
    assert log == [*(f"submitted {i}" for i in range(3)), *(f"ran {i}" for i in range(3))]


def test_a_step_that_fails_is_its_handles_affair_only(lane):
    def broken():
        raise ValueError("no such row")

    handles = [lane.launch(broken), lane.launch(lambda: StepOutput(1))]
    with pytest.raises(ValueError, match="no such row"):
        handles[0].result()
    assert handles[1].result().step_id == 1
    for handle in handles:
        with pytest.raises(RuntimeError, match="twice"):
            handle.result()


def test_after_an_interrupt_the_step_can_still_be_waited_for():
    class Interrupted(Future):
        def result(self, timeout=None):
            if not self.done():
                raise KeyboardInterrupt
            return super().result(timeout)

    future = Interrupted()
    handle = _FutureStep(future)
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    future.set_result("the tokens")
    assert handle.result() == "the tokens"


def test_every_torch_call_of_v2_is_made_by_one_thread_in_inference_mode(tmp_path, monkeypatch):
    """Modes and compiled code are per thread, and a second OpenMP pool would slow the first."""
    seen = set()
    linear = torch.nn.Linear.forward

    def watched(self, inputs):
        seen.add((threading.get_ident(), torch.is_inference_mode_enabled()))
        return linear(self, inputs)

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    folder = make_tiny_model("llama", tmp_path)
    with LLM(folder, runner="v2", enforce_eager=True) as llm:
        llm.generate([[5, 6], [7]], SamplingParams(max_tokens=4, ignore_eos=True))
    ((thread, inference_mode),) = seen
    assert thread != threading.get_ident()
    assert inference_mode
