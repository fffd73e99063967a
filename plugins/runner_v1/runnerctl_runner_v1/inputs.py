"""The model's inputs for one step, built on the host from the persistent batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runnerctl.runner.step import StepPlan

from .input_batch import InputBatch, RequestState
from .serving import ModelStep


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive prompt tokens of one request whose log-probabilities are wanted.

    Attributes:
        request_id, top: whose, and how many likeliest tokens to add.
        start: position of the first of these tokens in its request.
        token_ids: the tokens.
        rows: [len(token_ids)], where in the packed step the tokens before them are.
    """

    request_id: str
    top: int
    start: int
    token_ids: list[int]
    rows: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything one step needs.

    Attributes:
        step: for the model; its `logits_rows` are those of the spans, then one for each of
            `sampled_rows`.
        spans: prompt tokens that were asked for.
        sampled_rows: batch rows that get a new token, in batch order.
    """

    step: ModelStep
    spans: list[PromptSpan]
    sampled_rows: npt.NDArray[np.int64]


def prepare_inputs(
    batch: InputBatch,
    plan: StepPlan,
    states: dict[str, RequestState],
    block_size: int,
    carries_chunks: bool,
) -> StepInputs:
    """Build the inputs; every row of `batch` is a request of `plan`.

    Args:
        batch, plan: of this step.
        states: of the requests, by id.
        block_size: tokens per block of the cache.
        carries_chunks: the model may run a prompt in pieces. If not, a request whose
            prompt goes on after this step is left out, and its last piece brings all of it.
    """
    n = batch.num_rows
    end = np.array([plan.num_scheduled_tokens[r] for r in batch.request_ids], np.int32)
    end += batch.num_computed_tokens[:n]
    is_last = end == batch.num_tokens[:n]
    rows, start = np.arange(n), batch.num_computed_tokens[:n]
    if not carries_chunks:
        rows = np.flatnonzero(is_last)
        start = np.array([states[r].num_run_tokens for r in batch.request_ids], np.int32)
    start, end = start[rows], end[rows]
    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(end - start, out=query_start_loc[1:])
    of_token = np.repeat(np.arange(len(rows)), end - start)
    offsets = np.arange(query_start_loc[-1]) - query_start_loc[of_token]
    positions = start[of_token] + offsets
    # int64 before the product: a large cache has more slots than an int32 can count
    blocks = batch.block_table[rows[of_token], positions // block_size].astype(np.int64)
    running = [states[batch.request_ids[row]] for row in rows]
    spans = _prompt_spans(running, start, end, query_start_loc)
    # Only a request whose known tokens are all computed after this step gets a new one.
    last_tokens = query_start_loc[1:][is_last[rows]].astype(np.int64) - 1
    step = ModelStep(
        request_ids=[state.request_id for state in running],
        num_prompt_tokens=[state.num_prompt_tokens for state in running],
        token_ids=batch.token_ids[rows[of_token], positions].astype(np.int64),
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=end,
        block_table=batch.block_table[rows],
        slot_mapping=blocks * block_size + positions % block_size,
        logits_rows=np.concatenate([*(span.rows for span in spans), last_tokens]),
    )
    return StepInputs(step, spans, rows[is_last[rows]])


def _prompt_spans(
    states: Sequence[RequestState],
    first: npt.NDArray[np.int32],
    end: npt.NDArray[np.int32],
    query_start_loc: npt.NDArray[np.int32],
) -> list[PromptSpan]:
    """Prompt tokens whose predecessor is run in this step, for requests that asked.

    Args:
        states: of the requests of this step.
        first, end: of each, the positions that are run.
        query_start_loc: of the step.
    """
    spans = []
    for i, state in enumerate(states):
        top = state.sampling_params.prompt_logprobs
        start = int(first[i]) + 1
        stop = min(int(end[i]) + 1, state.num_prompt_tokens)
        if top is None or stop <= start:
            continue
        rows = query_start_loc[i] + np.arange(stop - start, dtype=np.int64)
        spans.append(PromptSpan(state.request_id, top, start, state.token_ids[start:stop], rows))
    return spans
