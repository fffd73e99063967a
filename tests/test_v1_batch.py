"""V1's persistent batch: every column follows its request when rows move."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runnerctl.engine.sampling_params import SamplingParams
from runnerctl_runner_v1.input_batch import InputBatch, RequestState

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 4, 20, 4
MAX_BLOCKS = 5


class BatchMachine(RuleBasedStateMachine):
    """Requests come, grow, leave and come back; a dict of plain values is the reference."""

    def __init__(self):
        super().__init__()
        self.batch = InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE)
        self.expected = {}
        self.next_id = 0

    @precondition(lambda self: len(self.expected) < MAX_NUM_SEQS)
    @rule(
        tokens=st.lists(st.integers(1, 250), min_size=1, max_size=MAX_MODEL_LEN - 1),
        blocks=st.lists(st.integers(1, 99), min_size=1, max_size=MAX_BLOCKS),
        computed=st.integers(0, 18),
        temperature=st.sampled_from([0.0, 0.5, 2.0]),
        top_k=st.integers(0, 50),
        top_p=st.sampled_from([0.25, 0.5, 1.0]),
        min_p=st.sampled_from([0.0, 0.125]),
        seed=st.integers(-(2**63), 2**63 - 1),
    )
    def add(self, tokens, blocks, computed, **params):
        name = f"r{self.next_id}"
        self.next_id += 1
        state = RequestState(
            request_id=name,
            sampling_params=SamplingParams(**params),
            num_prompt_tokens=1,
            stop_token_ids=frozenset(),
            token_ids=tokens,
            block_ids=blocks,
            num_computed_tokens=computed,
            num_run_tokens=computed,
        )
        self.batch.add(state)
        self.expected[name] = {"tokens": tokens, "blocks": blocks, "computed": computed} | params

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.batch.remove(name)
        del self.expected[name]

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), token=st.integers(1, 250), block=st.integers(1, 99))
    def grow(self, data, token, block):
        name = data.draw(st.sampled_from(sorted(self.expected)))
        known = self.expected[name]
        if len(known["tokens"]) < MAX_MODEL_LEN:
            self.batch.append_token(name, token)
            known["tokens"] = [*known["tokens"], token]
        if len(known["blocks"]) < MAX_BLOCKS:
            self.batch.append_blocks(name, [block])
            known["blocks"] = [*known["blocks"], block]

    @invariant()
    def every_row_holds_its_request(self):
        batch = self.batch
        assert batch.num_rows == len(self.expected)
        assert set(batch.request_ids) == set(self.expected)
        for name, known in self.expected.items():
            assert name in batch
            row = batch.row(name)
            assert batch.request_ids[row] == name
            assert batch.num_tokens[row] == len(known["tokens"])
            assert batch.num_computed_tokens[row] == known["computed"]
            assert batch.token_ids[row, : len(known["tokens"])].tolist() == known["tokens"]
            assert batch.block_table[row, : len(known["blocks"])].tolist() == known["blocks"]
            for column in ("temperature", "top_k", "top_p", "min_p", "seed"):
                assert getattr(batch, column)[row] == known[column], column


TestBatchMachine = BatchMachine.TestCase


def test_the_table_has_room_for_a_request_of_full_length():
    batch = InputBatch(2, 9, 4)
    assert batch.token_ids.shape == (2, 9)
    assert batch.block_table.shape == (2, 3)
    assert batch.block_table.dtype == np.int32
