"""The model's inputs for one step, built on the host from the persistent batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runnerctl.runner.attention.base import AttentionBatch
from runnerctl.runner.step import StepPlan

from .input_batch import InputBatch, RequestState


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
    """Everything one forward needs.

    Attributes:
        input_ids, positions: [num_tokens], int64, packed request after request.
        attention: the same tokens as the attention backend sees them.
        spans: prompt tokens that were asked for.
        sampled_rows: batch rows that get a new token, in batch order.
        logits_rows: [num_logits], int64; packed tokens whose logits are wanted: those of
            the spans, then one for each of `sampled_rows`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    spans: list[PromptSpan]
    sampled_rows: npt.NDArray[np.int64]
    logits_rows: torch.Tensor


def prepare_inputs(
    batch: InputBatch,
    plan: StepPlan,
    states: dict[str, RequestState],
    block_size: int,
    device: torch.device,
) -> StepInputs:
    """Build the inputs; every row of `batch` is a request of `plan`."""
    n = batch.num_rows
    scheduled = np.array([plan.num_scheduled_tokens[r] for r in batch.request_ids], np.int32)
    computed = batch.num_computed_tokens[:n]
    query_start_loc = np.zeros(n + 1, np.int32)
    np.cumsum(scheduled, out=query_start_loc[1:])
    row_of_token = np.repeat(np.arange(n), scheduled)
    offsets = np.arange(query_start_loc[-1]) - query_start_loc[row_of_token]
    positions = computed[row_of_token] + offsets
    # int64 before the product: a large cache has more slots than an int32 can count
    blocks = batch.block_table[row_of_token, positions // block_size].astype(np.int64)
    slot_mapping = blocks * block_size + positions % block_size
    # Only a request whose known tokens are all computed after this step gets a new one.
    sampled_rows = np.flatnonzero(computed + scheduled == batch.num_tokens[:n])
    spans = _prompt_spans(batch, states, scheduled, query_start_loc)
    last_tokens = query_start_loc[1:][sampled_rows].astype(np.int64) - 1
    logits_rows = np.concatenate([*(span.rows for span in spans), last_tokens])

    def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return StepInputs(
        input_ids=on_device(batch.token_ids[row_of_token, positions].astype(np.int64)),
        positions=on_device(positions),
        attention=AttentionBatch.from_host(
            query_start_loc=query_start_loc,
            seq_lens=computed + scheduled,
            block_table=on_device(batch.block_table[:n]),
            slot_mapping=on_device(slot_mapping),
        ),
        spans=spans,
        sampled_rows=sampled_rows,
        logits_rows=on_device(logits_rows),
    )


def _prompt_spans(
    batch: InputBatch,
    states: dict[str, RequestState],
    scheduled: npt.NDArray[np.int32],
    query_start_loc: npt.NDArray[np.int32],
) -> list[PromptSpan]:
    """Prompt tokens whose predecessor is computed in this step, for requests that asked."""
    spans = []
    for row, request_id in enumerate(batch.request_ids):
        state = states[request_id]
        top = state.sampling_params.prompt_logprobs
        start = state.num_computed_tokens + 1
        end = min(start + int(scheduled[row]), state.num_prompt_tokens)
        if top is None or end <= start:
            continue
        rows = query_start_loc[row] + np.arange(end - start, dtype=np.int64)
        spans.append(PromptSpan(request_id, top, start, state.token_ids[start:end], rows))
    return spans
