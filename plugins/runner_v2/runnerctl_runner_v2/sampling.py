"""From a step's logits to tokens and log-probabilities, all on the device.

What the host knows (parameters, lengths, who is banned from what) it says; token values
it does not know yet when a step is submitted, so whatever depends on them is looked up
in the state table. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runnerctl.runner.logits import Penalties, TokenBias, add_bias, apply_penalties
from runnerctl.runner.logprobs import LogprobTensors, compute_logprobs
from runnerctl.runner.sampler import SamplingBatch, SamplingTraits, sample
from runnerctl.runner.transfer import to_device

from .inputs import StepBatch
from .state_table import HostRow, StateTable

_BANNED = float("-inf")


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens whose predecessor is computed in this step.

    Attributes:
        place: in the batch.
        top: how many of the likeliest tokens to add.
        start, end: their positions in the sequence.
        first_row: where their predecessors start in the packed tokens.
    """

    place: int
    top: int
    start: int
    end: int
    first_row: int


def prompt_spans(batch: StepBatch) -> list[PromptSpan]:
    """For the requests of a batch that asked for log-probabilities of their prompt."""
    spans = []
    first_row = 0
    for place, row in enumerate(batch.rows):
        top, start = row.sampling_params.prompt_logprobs, batch.num_computed[place] + 1
        end = min(start + batch.num_scheduled[place], row.num_prompt_tokens)
        if top is not None and end > start:
            spans.append(PromptSpan(place, top, start, end, first_row))
        first_row += batch.num_scheduled[place]
    return spans


def logits_rows(batch: StepBatch, spans: list[PromptSpan], device: torch.device) -> torch.Tensor:
    """[num_rows], int64; packed tokens whose logits are wanted: of the spans, then last ones."""
    rows = [span.first_row + i for span in spans for i in range(span.end - span.start)]
    done, ends = 0, []
    for count in batch.num_scheduled:
        done += count
        ends.append(done - 1)
    return to_device(rows + [ends[place] for place in batch.sampling], torch.int64, device)


def prompt_logprobs(
    logits: torch.Tensor, table: StateTable, batch: StepBatch, spans: list[PromptSpan]
) -> LogprobTensors | None:
    """Of all spans, one after the other, as `logits` has their rows."""
    if not spans:
        return None
    known = [table.token_ids[batch.rows[s.place].index, s.start : s.end] for s in spans]
    return compute_logprobs(logits, torch.cat(known).long(), max(span.top for span in spans))


def sample_tokens(
    logits: torch.Tensor,
    table: StateTable,
    rows: list[HostRow],
    indices: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, LogprobTensors | None]:
    """One token for each row, written to the table, and log-probabilities if any row wants them.

    Args:
        logits: [num_rows, vocab_size], as the model gave them.
        rows: those that get a token; `num_tokens` counts it already.
        indices: [num_rows], int64; their places in the table.
        positions: [num_rows], int64; where in their sequences the new tokens are.

    Returns:
        [num_rows], int64, and the log-probabilities of the rows that asked.
    """
    device = logits.device
    params = [row.sampling_params for row in rows]
    if all(one.is_greedy for one in params):
        tokens = _processed(logits, table, rows, indices).argmax(dim=-1)
    else:
        parameters = SamplingBatch(
            temperature=table.temperature[indices],
            top_k=table.top_k[indices],
            top_p=table.top_p[indices],
            min_p=table.min_p[indices],
            seeds=table.seed[indices],
            positions=positions,
        )
        traits = SamplingTraits.of([(p.temperature, p.top_k, p.top_p) for p in params], device)
        tokens = sample(_processed(logits, table, rows, indices), parameters, traits)
    table.write_tokens(indices, positions, tokens)
    asking = [i for i, one in enumerate(params) if one.logprobs is not None]
    if not asking:
        return tokens, None
    chosen = to_device(asking, torch.int64, device)
    most = max(params[i].logprobs or 0 for i in asking)
    return tokens, compute_logprobs(logits[chosen], tokens[chosen], most)


def _processed(
    logits: torch.Tensor, table: StateTable, rows: list[HostRow], indices: torch.Tensor
) -> torch.Tensor:
    """Logits after bias, bans and penalties; the given ones if no row has any."""
    biases = _known_bias(rows, logits.device), _bad_words(table, rows, logits.device)
    penalised = [i for i, row in enumerate(rows) if _is_penalised(row)]
    if not any(biases) and not penalised:
        return logits
    logits = logits.to(torch.float32, copy=True)
    for bias in filter(None, biases):
        logits = add_bias(logits, bias)
    if penalised:
        chosen = to_device(penalised, torch.int64, logits.device)
        penalties = _penalties(table, [rows[i] for i in penalised], indices[chosen], logits)
        logits = logits.index_copy(0, chosen, apply_penalties(logits[chosen], penalties))
    return logits


def _known_bias(rows: list[HostRow], device: torch.device) -> TokenBias | None:
    """What depends on no token value: the user's bias, and no end before `min_tokens`."""
    entries: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        params = row.sampling_params
        entries += [(i, token_id, value) for token_id, value in params.logit_bias]  # type: ignore[misc]
        if row.num_tokens - 1 - row.num_prompt_tokens < params.min_tokens:
            entries += [(i, token_id, _BANNED) for token_id in row.stop_token_ids]
        # A bad word of one token is banned wherever it stands.
        entries += [(i, w[0], _BANNED) for w in params.bad_words_token_ids if len(w) == 1]
    if not entries:
        return None
    places, token_ids, values = zip(*entries, strict=True)
    return TokenBias(
        to_device(places, torch.int64, device),
        to_device(token_ids, torch.int64, device),
        to_device(values, torch.float32, device),
    )


def _bad_words(table: StateTable, rows: list[HostRow], device: torch.device) -> TokenBias | None:
    """The last token of a bad word, banned where the table says the others have just come."""
    words = [
        (i, row, word)
        for i, row in enumerate(rows)
        for word in row.sampling_params.bad_words_token_ids
        if 1 < len(word) <= row.num_tokens
    ]
    if not words:
        return None
    longest = max(len(word) for _, _, word in words) - 1
    positions, expected = [], []
    for _, row, word in words:
        padding = longest - (len(word) - 1)
        first = row.num_tokens - len(word)  # the word would end at num_tokens - 1
        positions += [0] * padding + list(range(first, row.num_tokens - 1))
        expected += [-1] * padding + list(word[:-1])
    shape = (len(words), longest)
    tables = to_device([row.index for _, row, _ in words], torch.int64, device).unsqueeze(1)
    found = table.token_ids[tables, to_device(positions, torch.int64, device).view(shape)]
    wanted = to_device(expected, torch.int32, device).view(shape)
    matches = ((found == wanted) | (wanted < 0)).all(dim=1)
    return TokenBias(
        to_device([i for i, _, _ in words], torch.int64, device),
        to_device([word[-1] for _, _, word in words], torch.int64, device),
        torch.zeros(len(words), device=device).masked_fill(matches, _BANNED),
    )


def _is_penalised(row: HostRow) -> bool:
    params = row.sampling_params
    off = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return off != (1.0, 0.0, 0.0)


def _penalties(
    table: StateTable, rows: list[HostRow], indices: torch.Tensor, logits: torch.Tensor
) -> Penalties:
    """Counts over the tokens that the table has of these rows."""
    device = logits.device
    params = [row.sampling_params for row in rows]
    longest = max(row.num_tokens for row in rows) - 1
    token_ids = table.token_ids[:, :longest].index_select(0, indices).long()
    lengths = [*(row.num_prompt_tokens for row in rows), *(row.num_tokens - 1 for row in rows)]
    num_prompt, num_known = to_device(lengths, torch.int64, device).view(2, -1, 1)
    position = torch.arange(longest, device=device)
    in_prompt, known = position < num_prompt, position < num_known

    def counts(mask: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(len(rows), logits.shape[1], device=device)
        return zeros.scatter_add_(1, token_ids, mask.float())

    numbers = [
        *(p.repetition_penalty for p in params),
        *(p.presence_penalty for p in params),
        *(p.frequency_penalty for p in params),
    ]
    repetition, presence, frequency = to_device(numbers, torch.float32, device).view(3, -1)
    return Penalties(
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        in_prompt=counts(in_prompt) > 0,
        output_counts=counts(known & ~in_prompt),
    )
