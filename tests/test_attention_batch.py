"""What attention backends are given: lengths on the device and on the host, which must agree."""

import numpy as np
import torch

from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.runner.attention.base import AttentionBatch
from runnerctl.runner.step import StepPlan
from runnerctl_runner_v1.input_batch import InputBatch, RequestState
from runnerctl_runner_v1.inputs import prepare_inputs
from runnerctl_runner_v1.packed import attention_batch

BLOCK_SIZE = 4


def v1_batch(block_ids):
    """What V1 gives its backend for a chunk of 3 after 6 tokens, and a decode at 4 of 5."""
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=BLOCK_SIZE)
    states = {}
    for name, tokens, computed in (("a", 9, 6), ("b", 5, 4)):
        state = RequestState(
            request_id=name,
            sampling_params=SamplingParams(seed=0),
            num_prompt_tokens=tokens,
            stop_token_ids=frozenset(),
            token_ids=list(range(tokens)),
            block_ids=block_ids[name],
            num_computed_tokens=computed,
            num_run_tokens=computed,
        )
        states[name] = state
        batch.add(state)
    plan = StepPlan(step_id=1, num_scheduled_tokens={"a": 3, "b": 1})
    inputs = prepare_inputs(batch, plan, states, BLOCK_SIZE, carries_chunks=True)
    return attention_batch(inputs.step, torch.device("cpu"))


def test_v1_describes_its_step_to_the_backend():
    batch = v1_batch({"a": [7, 5, 6], "b": [2, 3]})
    assert batch.query_start_loc.tolist() == [0, 3, 4] == batch.query_start_loc_np.tolist()
    assert batch.seq_lens.tolist() == [9, 5] == batch.seq_lens_np.tolist()
    assert (batch.max_query_len, batch.max_seq_len) == (3, 9)
    assert batch.block_table[0, :3].tolist() == [7, 5, 6]
    assert batch.block_table[1, :2].tolist() == [2, 3]
    assert batch.slot_mapping.tolist() == [5 * 4 + 2, 5 * 4 + 3, 6 * 4, 3 * 4]


def test_the_types_are_those_that_the_kernels_take():
    batch = v1_batch({"a": [7, 5, 6], "b": [2, 3]})
    tensors = (batch.query_start_loc, batch.seq_lens, batch.block_table)
    assert {t.dtype for t in tensors} == {torch.int32}
    assert batch.slot_mapping.dtype == torch.int64
    assert batch.block_table.stride(-1) == 1
    assert {batch.query_start_loc_np.dtype, batch.seq_lens_np.dtype} == {np.dtype(np.int32)}
    assert type(batch.max_query_len) is type(batch.max_seq_len) is int


def test_slots_beyond_what_an_int32_counts_do_not_wrap_around():
    far = 2**30
    batch = v1_batch({"a": [far, far + 1, far + 2], "b": [2, 3]})
    assert batch.slot_mapping.tolist()[0] == (far + 1) * BLOCK_SIZE + 2


def test_lengths_made_on_the_host_reach_the_device_as_they_are():
    batch = AttentionBatch.from_host(
        query_start_loc=np.array([0, 2, 9, 10], np.int32),
        seq_lens=np.array([30, 7, 8], np.int32),
        block_table=torch.zeros(3, 2, dtype=torch.int32),
        slot_mapping=torch.arange(10),
    )
    assert batch.query_start_loc.tolist() == [0, 2, 9, 10]
    assert batch.seq_lens.tolist() == [30, 7, 8]
    assert (batch.max_query_len, batch.max_seq_len) == (7, 30)
