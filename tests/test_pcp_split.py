"""How pcp deals the tokens of a step to ranks: every token once, evenly, and back in order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runnerctl.runner.attention.base import AttentionBatch
from runnerctl_pcp.share import PrefillShare, PrefillSplit
from runnerctl_pcp.split import pieces_of_rank, sources, token_rows

BLOCK_SIZE = 4
STEPS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 50)), min_size=1, max_size=6)
SIZES = st.integers(2, 8)


class Group:
    """A rank's group without other processes: what each rank gives is known to all of them."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.given = None

    def all_gather(self, tensor):
        return torch.stack(self.given(tensor))


def batch_of(step):
    """The batch of requests of (scheduled, computed) tokens; each has blocks of its own."""
    scheduled = np.array([s for s, _ in step], np.int32)
    seq_lens = scheduled + np.array([c for _, c in step], np.int32)
    query_start_loc = np.zeros(len(step) + 1, np.int32)
    np.cumsum(scheduled, out=query_start_loc[1:])
    width = -(-int(seq_lens.max()) // BLOCK_SIZE)
    block_table = torch.arange(len(step) * width, dtype=torch.int32).view(len(step), width)
    return AttentionBatch.from_host(
        query_start_loc, seq_lens, block_table, torch.arange(int(query_start_loc[-1]))
    )


def shares_of(step, size) -> list[PrefillShare]:
    batch = batch_of(step)
    shares = []
    for rank in range(size):
        split = PrefillSplit.__new__(PrefillSplit)
        split._group = Group(rank, size)
        shares.append(split.split(batch))
    return shares


@given(STEPS, SIZES)
def test_every_token_of_a_chunk_is_run_once_and_single_ones_by_every_rank(step, size):
    batch = batch_of(step)
    times = np.zeros(int(batch.query_start_loc_np[-1]), int)
    for rank in range(size):
        pieces = pieces_of_rank(batch.query_start_loc_np, batch.seq_lens_np, rank, size)
        np.add.at(times, token_rows(pieces), 1)
    expected = np.concatenate([np.full(s, 1 if s > 1 else size) for s, _ in step])
    assert times.tolist() == expected.tolist()


@given(STEPS, SIZES)
def test_no_rank_runs_more_than_its_part_and_all_run_as_many(step, size):
    shares = [share for share in shares_of(step, size) if share is not None]
    bound = sum(2 * -(-scheduled // (2 * size)) for scheduled, _ in step if scheduled > 1)
    single = sum(scheduled == 1 for scheduled, _ in step)
    assert len({len(share.token_rows) for share in shares}) <= 1
    for share in shares:
        assert 1 <= len(share.token_rows) <= bound + single
        assert len(share.token_rows) == share.attention.query_start_loc_np[-1]


@given(st.integers(2, 3000), SIZES)
def test_the_work_of_attention_is_even(length, size):
    """In pairs of tokens that are compared; what a token costs beside is even by their number."""
    batch = batch_of([(length, 0)])
    work = []
    for rank in range(size):
        pieces = pieces_of_rank(batch.query_start_loc_np, batch.seq_lens_np, rank, size)
        positions = [range(p.seq_len - (p.end - p.start), p.seq_len) for p in pieces]
        work.append(sum(position + 1 for of_piece in positions for position in of_piece))
    # one token more or less in each of two pieces, of those that compare most
    assert max(work) - min(work) <= 2 * (length + 1)


@given(STEPS, SIZES)
def test_each_piece_sees_the_tokens_up_to_its_own(step, size):
    batch = batch_of(step)
    for share in filter(None, shares_of(step, size)):
        attention = share.attention
        lengths = np.diff(attention.query_start_loc_np)
        rows = share.token_rows.tolist()
        for i, (length, seq_len) in enumerate(zip(lengths, attention.seq_lens_np, strict=True)):
            last = rows[attention.query_start_loc_np[i + 1] - 1]
            request = int(np.searchsorted(batch.query_start_loc_np, last, side="right")) - 1
            assert attention.block_table[i].tolist() == batch.block_table[request].tolist()
            position = last - batch.query_start_loc_np[request] + step[request][1]
            is_filler = last == 0 and length == 1 and seq_len == 1
            assert is_filler or position == seq_len - 1


@given(STEPS, SIZES)
def test_keys_values_and_hidden_states_come_back_in_order(step, size):
    shares = [share for share in shares_of(step, size) if share is not None]
    if not shares:
        return
    num_tokens = sum(scheduled for scheduled, _ in step)
    keys = torch.randn(num_tokens, 2, 3)
    values = torch.randn(num_tokens, 2, 5)
    hidden = torch.randn(num_tokens, 7)
    wanted = torch.randperm(num_tokens)[: max(1, num_tokens // 2)]
    for share in shares:
        of_ranks = [other.token_rows for other in shares]
        flat = torch.cat((keys.flatten(1), values.flatten(1)), dim=1)
        share.group.given = lambda _, rows=of_ranks, x=flat: [x[r] for r in rows]
        got_keys, got_values = share.exchange_kv(keys[share.token_rows], values[share.token_rows])
        assert torch.equal(got_keys, keys)
        assert torch.equal(got_values, values)
        source = share.source[wanted] % len(share.token_rows)
        share.group.given = lambda _, rows=of_ranks, s=source: [hidden[r][s] for r in rows]
        restored = share.restore(hidden[share.token_rows], wanted)
        assert torch.equal(restored, hidden[wanted])


def test_a_token_that_all_ranks_run_is_taken_from_the_first():
    rows = [np.array([0, 1]), np.array([0, 2])]
    assert sources(rows, 3, 2).tolist() == [0, 1, 3]


def test_steps_that_only_decode_are_not_split():
    assert shares_of([(1, 5), (1, 9)], 2) == [None, None]


def test_nothing_is_exchanged_where_no_row_is_wanted():
    share = shares_of([(9, 0)], 2)[0]
    nothing = share.restore(
        torch.randn(len(share.token_rows), 7), torch.zeros(0, dtype=torch.int64)
    )
    assert nothing.shape == (0, 7)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_prompt_shorter_than_two_tokens_per_rank_leaves_no_rank_without_one(size):
    for length in range(2, 2 * size):
        shares = shares_of([(length, 0)], size)
        assert {len(share.token_rows) for share in shares} <= {1, 2}
        assert len({len(share.token_rows) for share in shares}) == 1
