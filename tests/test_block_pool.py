"""The block pool alone: references, order of reuse, the prefix index, leaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runnerctl.engine.block_pool import ROOT_HASH, BlockPool, hash_block


def chain(*blocks):
    hashes, parent = [], ROOT_HASH
    for tokens in blocks:
        parent = hash_block(parent, tokens)
        hashes.append(parent)
    return hashes


def test_blocks_of_equal_tokens_differ_by_their_prefix():
    assert chain([1, 2], [5, 6])[1] != chain([3, 4], [5, 6])[1]
    assert chain([1, 2], [5, 6]) == chain([1, 2], [5, 6])


def test_a_released_block_is_found_until_it_is_handed_out_again():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    (key,) = chain([1, 2, 3])
    pool.index(block, key)
    pool.release([block])
    assert pool.find_prefix([key]) == [block]
    # the other block was never used and goes first
    other = pool.allocate(1)
    assert other != [block]
    assert pool.find_prefix([key]) == [block]
    assert pool.allocate(1) == [block]
    assert pool.find_prefix([key]) == []


def test_the_tail_of_a_request_is_reused_before_its_head():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert pool.allocate(3) == blocks[::-1]


def test_a_hit_stops_at_the_first_unknown_block():
    pool = BlockPool(3)
    first, second, third = chain([1], [2], [3])
    blocks = pool.allocate(3)
    pool.index(blocks[0], first)
    pool.index(blocks[2], third)
    assert pool.find_prefix([first, second, third]) == [blocks[0]]


def test_of_two_blocks_with_equal_contents_the_first_stays_the_known_one():
    pool = BlockPool(2)
    (key,) = chain([1, 2, 3])
    first, second = pool.allocate(2)
    pool.index(first, key)
    pool.index(second, key)
    assert pool.find_prefix([key]) == [first]
    # the other one is nobody's prefix: handing it out forgets nothing
    pool.release([second])
    pool.allocate(1)
    assert pool.find_prefix([key]) == [first]


def test_a_shared_block_is_free_only_after_its_last_holder():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_free_blocks == 0
    with pytest.raises(RuntimeError, match="leaked"):
        pool.check_idle()
    pool.release(blocks)
    pool.check_idle()


def test_a_retired_block_keeps_its_contents_and_is_not_handed_out():
    pool = BlockPool(2)
    (key,) = chain([1, 2, 3])
    blocks = pool.allocate(1)
    pool.index(blocks[0], key)
    pool.retire(blocks)
    assert (pool.num_free_blocks, pool.num_leaving_blocks) == (1, 1)
    assert pool.find_prefix([key]) == blocks
    # somebody new holds on to it: it will not be free when the step in flight is done
    pool.hold(blocks)
    assert pool.num_leaving_blocks == 0
    pool.release_retired(blocks)
    assert pool.num_free_blocks == 1
    pool.release(blocks)
    pool.check_idle()


def test_more_than_there_is_cannot_be_allocated():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 KV blocks asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2


class PoolMachine(RuleBasedStateMachine):
    """Requests come and go with shared prefixes; a plain count is the reference."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6)
        self.live = []
        self.retired = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def admit(self, tokens):
        hashes = chain(*[[t] for t in tokens])
        prefix = self.pool.find_prefix(hashes)
        missing = len(hashes) - len(prefix)
        if missing + self.pool.num_free_among(prefix) > self.pool.num_free_blocks:
            return
        self.pool.hold(prefix)
        blocks = prefix + self.pool.allocate(missing)
        assert len(set(blocks)) == len(blocks)
        new = set(blocks[len(prefix) :])
        assert not any(new & set(other) for other, _ in [*self.live, *self.retired])
        for block, key in zip(blocks, hashes, strict=True):
            self.pool.index(block, key)
        self.live.append((blocks, hashes))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data):
        blocks, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.release(blocks)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave_with_a_step_in_flight(self, data):
        gone = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.retire(gone[0])
        self.retired.append(gone)

    @precondition(lambda self: self.retired)
    @rule()
    def the_step_has_a_result(self):
        blocks, _ = self.retired.pop(0)
        self.pool.release_retired(blocks)

    @rule()
    def everybody_leaves_at_once(self):
        self.pool.release_all()
        self.live, self.retired = [], []

    @invariant()
    def every_block_is_held_or_leaving_or_free(self):
        held = {block for blocks, _ in self.live for block in blocks}
        retired = {block for blocks, _ in self.retired for block in blocks}
        assert self.pool.num_leaving_blocks == len(retired - held)
        assert self.pool.num_free_blocks == 6 - len(held | retired)
        if not self.live and not self.retired:
            self.pool.check_idle()

    @invariant()
    def live_prefixes_stay_findable(self):
        for _, hashes in self.live:
            assert len(self.pool.find_prefix(hashes)) == len(hashes)


TestPoolMachine = PoolMachine.TestCase


@given(st.lists(st.integers(-(2**40), 2**40)), st.lists(st.integers(-(2**40), 2**40)))
def test_hashes_tell_token_lists_apart(left, right):
    assert (hash_block(ROOT_HASH, left) == hash_block(ROOT_HASH, right)) == (left == right)
