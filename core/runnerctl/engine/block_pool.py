"""The paged KV blocks: who holds which, and which still hold a known prefix.

A block is free when nobody references it. A free block keeps its contents, and
its place in the prefix cache, until it is handed out again; the least recently
freed goes first. A block whose holders are gone, but which a step in flight may still
write, is retired: nobody's, and not yet free.

The idea of hash-chained blocks in a free queue follows vLLM's automatic prefix
caching; keys here are digests of the whole prefix, so that two prefixes never share
a block by accident.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

BlockHash = bytes
ROOT_HASH: BlockHash = b""


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The key of a full block: of its tokens and, through `parent`, of all before them."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """All KV blocks of one engine, by id from 0 to `num_blocks - 1`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_count = [0] * num_blocks
        # references, among those, of requests that are gone: steps in flight hold them
        self._num_retired = [0] * num_blocks
        self._num_leaving = 0
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, int] = {}
        # in the order in which they will be handed out
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references, cached ones included."""
        return len(self._free)

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks that will be free once the steps in flight have their results."""
        return self._num_leaving

    def find_prefix(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The ids of the longest cached run of blocks from the start of `hashes`.

        They are not held yet: `hold` them before anything is allocated.
        """
        found = []
        for block_hash in hashes:
            block_id = self._cached.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these would leave the free queue if they were held."""
        return sum(self._ref_count[block_id] == 0 for block_id in block_ids)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks found by `find_prefix`."""
        for block_id in block_ids:
            if self._ref_count[block_id] == 0:
                del self._free[block_id]
            elif self._ref_count[block_id] == self._num_retired[block_id]:
                self._num_leaving -= 1
            self._ref_count[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks; their old contents leave the prefix cache.

        Raises:
            ValueError: fewer are free. Callers look at `num_free_blocks` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} KV blocks asked for, {len(self._free)} free")
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self._ref_count[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a request, given in order of position.

        The tail is freed first, so that it is also reused first: a shorter prefix
        is of use to more requests than a longer one.
        """
        for block_id in reversed(block_ids):
            self._ref_count[block_id] -= 1
            if self._ref_count[block_id] == 0:
                self._free[block_id] = None
            elif self._ref_count[block_id] == self._num_retired[block_id]:
                self._num_leaving += 1

    def retire(self, block_ids: Sequence[int]) -> None:
        """Announce that one reference of each block is dropped later, by `release_retired`.

        Until then the blocks are held as before: a step in flight may write them.
        """
        for block_id in block_ids:
            self._num_retired[block_id] += 1
            if self._ref_count[block_id] == self._num_retired[block_id]:
                self._num_leaving += 1

    def release_retired(self, block_ids: Sequence[int]) -> None:
        """Drop the references that `retire` announced; as `release` otherwise."""
        for block_id in reversed(block_ids):
            self._num_retired[block_id] -= 1
            self._ref_count[block_id] -= 1
            if self._ref_count[block_id] == 0:
                self._num_leaving -= 1
                self._free[block_id] = None

    def release_all(self) -> None:
        """Drop every reference, whoever held it; what is known of contents stays."""
        for block_id in range(self.num_blocks):
            self._free.setdefault(block_id)
        self._ref_count = [0] * self.num_blocks
        self._num_retired = [0] * self.num_blocks
        self._num_leaving = 0

    def index(self, block_id: int, block_hash: BlockHash) -> None:
        """Make a full, computed block findable; a second one with equal contents stays unknown."""
        if block_hash not in self._cached:
            self._forget(block_id)
            self._cached[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def check_idle(self) -> None:
        """Raise RuntimeError if any block is still held; call it when no request lives."""
        held = [block_id for block_id, count in enumerate(self._ref_count) if count]
        if held or len(self._free) != self.num_blocks:
            raise RuntimeError(
                f"KV blocks leaked: {len(self._free)} of {self.num_blocks} are free, "
                f"held without a request: {held[:20]}"
            )

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hash_of[block_id] = None
