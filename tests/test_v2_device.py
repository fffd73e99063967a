"""V2's table, step inputs and sampling: right against plain Python, and never waiting."""

import random

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from runnerctl.config.engine_config import SchedulerSection
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.runner.step import CachedRequest, NewRequest, StepPlan
from runnerctl_runner_v2.inputs import StepBatch, prepare, prepare_decode
from runnerctl_runner_v2.sampling import (
    logits_rows,
    prompt_logprobs,
    prompt_spans,
    sample_tokens,
)
from runnerctl_runner_v2.state_table import StateTable
from runnerctl_runner_v2.warm_up import warm_up_plans

BLOCK_SIZE, MAX_MODEL_LEN, VOCAB = 4, 32, 50
CPU = torch.device("cpu")

EVERYTHING = SamplingParams(
    seed=3,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    min_tokens=3,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={7: 2.0},
    bad_words_token_ids=[[4], [1, 2], [5, 6, 7]],
    logprobs=2,
    prompt_logprobs=1,
)
GREEDY = SamplingParams(seed=0, temperature=0)


def table(max_num_seqs=4, scratch_block=99):
    return StateTable(max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE, scratch_block, CPU)


def new(name, tokens, blocks, *, params=GREEDY, computed=0, num_prompt=None):
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    return NewRequest(name, tuple(tokens), params, num_prompt, frozenset({9}), blocks, computed)


def plan(*requests, finished=(), preempted=(), **scheduled):
    return StepPlan(
        0,
        new_requests=tuple(r for r in requests if isinstance(r, NewRequest)),
        cached_requests=tuple(r for r in requests if isinstance(r, CachedRequest)),
        num_scheduled_tokens=scheduled,
        finished_request_ids=frozenset(finished),
        preempted_request_ids=frozenset(preempted),
    )


def run(state, a_plan, tokens=None):
    """Prepare a step, and pretend that it sampled `tokens`."""
    state.update(a_plan)
    batch = StepBatch.of(a_plan, state)
    inputs = prepare(state, batch)
    batch.advance(state, inputs.idx_mapping, inputs.num_scheduled)
    for place, token in zip(batch.sampling, tokens or (), strict=True):
        row = batch.rows[place]
        state.token_ids[row.index, row.num_tokens - 1] = token
    return batch, inputs


def slots(blocks, start, end):
    return [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]


def test_a_ragged_batch_of_a_prefill_a_chunk_and_a_decode():
    state = table()
    run(state, plan(new("d", [11, 12, 13], (5,)), d=3), [14])
    requests = new("p", [21, 22, 23, 24, 25], (6, 7)), new("c", [31, 32, 33], (8,), computed=1)
    cached = CachedRequest("d", (2,), 3)
    batch, inputs = run(state, plan(*requests, cached, p=5, c=1, d=1), [41, 15])
    assert [batch.request_ids[i] for i in batch.sampling] == ["p", "d"]  # c has one more to go
    assert inputs.input_ids.tolist() == [21, 22, 23, 24, 25, 32, 14]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 1, 3]
    attention = inputs.attention
    expected = slots((6, 7), 0, 5) + slots((8,), 1, 2) + slots((5, 2), 3, 4)
    assert attention.slot_mapping.tolist() == expected
    assert attention.query_start_loc.tolist() == [0, 5, 6, 7]
    assert attention.seq_lens.tolist() == attention.seq_lens_np.tolist() == [5, 2, 4]
    assert (attention.max_query_len, attention.max_seq_len) == (5, 5)
    assert attention.block_table[0].tolist() == [6, 7]
    assert not batch.is_decode


def test_decode_inputs_are_those_of_any_other_batch():
    """The fast path and the general one agree on a batch that both can take."""
    rng = random.Random(0)
    state = table(max_num_seqs=6)
    names = "abcdef"
    lengths = dict(zip(names, (1, 3, 4, 5, 8, 17), strict=True))
    free = list(range(40))
    rng.shuffle(free)
    blocks = {name: tuple(free.pop() for _ in range(6)) for name in names}
    requests = [
        new(name, [rng.randrange(VOCAB) for _ in range(n)], blocks[name])
        for name, n in lengths.items()
    ]
    run(state, plan(*requests, **lengths), list(range(6)))
    chosen = dict.fromkeys("ebdf", 1)
    step = plan(*(CachedRequest(name, (), lengths[name]) for name in chosen), **chosen)
    state.update(step)
    batch = StepBatch.of(step, state)
    assert batch.is_decode
    general = prepare(state, batch)
    seq_lens = np.array(batch.num_computed, np.int32) + 1
    fast = prepare_decode(state, general.idx_mapping, seq_lens)
    for name in ("idx_mapping", "num_scheduled", "input_ids", "positions"):
        left, right = getattr(general, name), getattr(fast, name)
        assert torch.equal(left, right), name
        assert left.dtype == right.dtype, name
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        left, right = getattr(general.attention, name), getattr(fast.attention, name)
        assert torch.equal(left, right), name
        assert left.dtype == right.dtype, name
    assert (general.attention.seq_lens_np == fast.attention.seq_lens_np).all()
    assert (general.attention.query_start_loc_np == fast.attention.query_start_loc_np).all()
    assert general.attention.max_seq_len == fast.attention.max_seq_len


def test_a_place_without_a_request_writes_to_the_scratch_block():
    state = table(scratch_block=77)
    run(state, plan(new("a", [1, 2], (3,)), a=2), [5])
    rows = torch.tensor([state.row("a").index, state.padding_row, state.padding_row])
    inputs = prepare_decode(state, rows, np.array([3, 1, 1], np.int32))
    assert inputs.attention.slot_mapping.tolist() == [3 * BLOCK_SIZE + 2, *[77 * BLOCK_SIZE] * 2]
    assert inputs.attention.seq_lens.tolist() == [3, 1, 1]


def test_rows_are_given_back_and_keep_nothing_of_their_last_request():
    state = table(max_num_seqs=1)
    old = SamplingParams(seed=5, temperature=1.5, top_k=3, top_p=0.5, min_p=0.2)
    run(state, plan(new("old", list(range(10)), (1, 2, 3), params=old), old=10), [11])
    run(state, plan(new("next", [7], (4,)), finished=["old"], next=1), [8])
    _, inputs = run(state, plan(CachedRequest("next", (), 1), next=1), [9])
    assert inputs.input_ids.tolist() == [8]
    assert inputs.attention.slot_mapping.tolist() == slots((4,), 1, 2)
    row = state.row("next").index
    columns = (state.temperature, state.top_k, state.top_p, state.min_p, state.seed)
    assert [column[row].item() for column in columns] == [0, 0, 1, 0, 0]
    # and the same id again, before anybody said that it is finished
    run(state, plan(new("next", [3, 3], (5,)), next=2), [6])
    state.update(plan(preempted=["next"]))
    run(state, plan(new("other", [1], (6,)), other=1), [2])


def test_a_request_that_outgrows_its_row_is_stopped_before_it_writes_into_the_next():
    state = table(max_num_seqs=2)
    full = list(range(MAX_MODEL_LEN - 1))
    run(state, plan(new("full", full, tuple(range(8))), full=len(full)), [5])
    run(state, plan(new("next", [1, 2], (9,)), next=2), [3])
    before = state.token_ids.clone()
    over = plan(CachedRequest("full", (), MAX_MODEL_LEN - 1), full=1)
    with pytest.raises(RuntimeError, match="request full to 33 tokens; max_model_len is 32"):
        run(state, over, [6])
    assert torch.equal(state.token_ids, before)
    assert state.row("full").num_computed_tokens == MAX_MODEL_LEN - 1


@pytest.mark.parametrize("max_model_len", range(1, 13))
def test_warming_up_stays_within_the_longest_request(max_model_len):
    limits = SchedulerSection(max_num_seqs=4, max_num_batched_tokens=16)
    state = StateTable(4, max_model_len, BLOCK_SIZE, 99, CPU)
    for step in warm_up_plans(limits, max_model_len, BLOCK_SIZE, 99):
        if step.num_scheduled_tokens:  # the last one only says that all are finished
            run(state, step, [0] * len(step.num_scheduled_tokens))


@pytest.fixture
def fake():
    """Tensors without data: asking for a value, or for a shape made of values, raises."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        yield


def fake_step(params, num_reqs=3):
    state = table()
    names = [f"r{i}" for i in range(num_reqs)]
    requests = [
        new(name, [1, 2, 3, 4, 5], (i, i + 10), params=params) for i, name in enumerate(names)
    ]
    first = plan(*requests, **dict.fromkeys(names, 5))
    state.update(first)
    return state, StepBatch.of(first, state), names


@pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
def test_a_step_waits_for_nothing(fake, params):
    state, batch, names = fake_step(params)
    spans = prompt_spans(batch)
    inputs = prepare(state, batch)
    batch.advance(state, inputs.idx_mapping, inputs.num_scheduled)
    rows = logits_rows(batch, spans, CPU)
    logits = torch.randn(rows.shape[0], VOCAB)
    num_prompt_rows = sum(span.end - span.start for span in spans)
    prompt_logprobs(logits[:num_prompt_rows], state, batch, spans)
    tokens, _ = sample_tokens(
        logits[num_prompt_rows:], state, batch.rows, inputs.idx_mapping, inputs.positions[:3]
    )
    assert tokens.shape == (3,)
    decode = plan(*(CachedRequest(name, (7,), 5) for name in names), **dict.fromkeys(names, 1))
    state.update(decode)
    batch = StepBatch.of(decode, state)
    again = prepare_decode(state, inputs.idx_mapping, np.full(3, MAX_MODEL_LEN, np.int32))
    batch.advance(state, again.idx_mapping, again.num_scheduled)
    assert again.input_ids.shape == (3,)
    logits = torch.randn(3, VOCAB)
    tokens, logprobs = sample_tokens(
        logits, state, batch.rows, again.idx_mapping, again.positions + 1
    )
    assert tokens.shape == (3,)
    assert (logprobs is None) == (params is GREEDY)


def test_waiting_would_be_noticed(fake):
    state, _, _ = fake_step(GREEDY)
    with pytest.raises(Exception, match="_local_scalar_dense"):
        state.num_computed_tokens.sum().item()
    with pytest.raises(Exception, match="nonzero"):
        state.temperature.nonzero()
