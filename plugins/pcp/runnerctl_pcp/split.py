"""Who runs what: the query tokens of a step, cut in pieces and dealt to the ranks.

A token attends to all tokens before it, so the later half of a prompt is three times the
work of the first. Each chunk is therefore cut in two pieces per rank, and rank r of n runs
pieces r and 2n - 1 - r, which together cost every rank the same (the scheme of Megatron-LM's
and vLLM's context parallelism). Requests with one token are run by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive query tokens of one request.

    Attributes:
        request: place in the batch.
        start, end: of the tokens, in the packed step.
        seq_len: tokens of the request up to the last of these.
    """

    request: int
    start: int
    end: int
    seq_len: int


def pieces_of_rank(
    query_start_loc: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], rank: int, size: int
) -> list[Piece]:
    """The pieces that one rank runs, in the order of the batch.

    Args:
        query_start_loc: [num_reqs + 1]; where each request's tokens start.
        seq_lens: [num_reqs]; tokens of each, including this step's.
        rank, size: of the group.
    """
    pieces = []
    bounds = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[request], bounds[request + 1]
        computed = seq_len - (end - start)
        if end - start == 1:
            pieces.append(Piece(request, start, end, seq_len))
            continue
        for index in (rank, 2 * size - 1 - rank):
            # pieces differ by one token at most
            first = (end - start) * index // (2 * size)
            last = (end - start) * (index + 1) // (2 * size)
            if first < last:
                pieces.append(Piece(request, start + first, start + last, computed + last))
    return pieces


def token_rows(pieces: list[Piece]) -> Ints:
    """[num_tokens]; the tokens of pieces, in their order."""
    return np.concatenate(
        [np.zeros(0, np.int64), *(np.arange(p.start, p.end, dtype=np.int64) for p in pieces)]
    )


def sources(rows_of_ranks: list[Ints], num_tokens: int, num_local_tokens: int) -> Ints:
    """[num_tokens]; where each token of the step is among all ranks' tokens, put end to end.

    Args:
        rows_of_ranks: of each rank, as `token_rows` gives them.
        num_tokens: of the step.
        num_local_tokens: of every rank, filled up.
    """
    found = np.empty(num_tokens, np.int64)
    # The first rank last: of a token that all of them run, its result is everybody's.
    for rank in reversed(range(len(rows_of_ranks))):
        rows = rows_of_ranks[rank]
        found[rows] = rank * num_local_tokens + np.arange(len(rows))
    return found
