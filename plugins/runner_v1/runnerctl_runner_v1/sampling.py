"""From one step's logits to its result: sampled tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runnerctl.runner.logits import Penalties, TokenBias, add_bias, apply_penalties, count_tokens
from runnerctl.runner.logprobs import gather_logprobs
from runnerctl.runner.sampler import SamplingBatch, SamplingTraits, sample
from runnerctl.runner.step import TokenLogprobs

from .input_batch import InputBatch, RequestState
from .inputs import PromptSpan, StepInputs

_BANNED = float("-inf")


def sample_tokens(
    logits: torch.Tensor, inputs: StepInputs, batch: InputBatch, states: Sequence[RequestState]
) -> tuple[list[int], dict[str, TokenLogprobs]]:
    """One token for each of `states`, and its log-probabilities where they are wanted.

    Args:
        logits: [len(states), vocab_size], as the model gave them.
        inputs: of this step; `inputs.sampled_rows` are the rows of `states` in `batch`.
        batch: the persistent batch.
        states: the requests that get a token.
    """
    device = logits.device
    rows = inputs.sampled_rows
    parameters = SamplingBatch(
        temperature=torch.from_numpy(batch.temperature[rows]),
        top_k=torch.from_numpy(batch.top_k[rows]),
        top_p=torch.from_numpy(batch.top_p[rows]),
        min_p=torch.from_numpy(batch.min_p[rows]),
        seeds=torch.from_numpy(batch.seed[rows]),
        positions=torch.from_numpy(batch.num_tokens[rows]).long(),
    )
    limits = [(p.temperature, p.top_k, p.top_p) for p in (s.sampling_params for s in states)]
    traits = SamplingTraits.of(limits, device)
    tokens = sample(_processed(logits, states), parameters.to(device), traits)
    asking = [i for i, s in enumerate(states) if s.sampling_params.logprobs is not None]
    logprobs = {}
    if asking:
        counts = [states[i].sampling_params.logprobs or 0 for i in asking]
        entries = gather_logprobs(logits[asking], tokens[asking], counts)
        logprobs = {states[i].request_id: e for i, e in zip(asking, entries, strict=True)}
    return tokens.tolist(), logprobs


def prompt_logprobs(
    logits: torch.Tensor, spans: Sequence[PromptSpan]
) -> dict[str, tuple[int, list[TokenLogprobs]]]:
    """The log-probabilities of all spans; `logits` has their rows one after the other."""
    result = {}
    done = 0
    for span in spans:
        count = len(span.token_ids)
        token_ids = torch.tensor(span.token_ids, device=logits.device)
        entries = gather_logprobs(logits[done : done + count], token_ids, [span.top] * count)
        result[span.request_id] = (span.start, entries)
        done += count
    return result


def _processed(logits: torch.Tensor, states: Sequence[RequestState]) -> torch.Tensor:
    """Logits after bias, bans and penalties; the given ones if no request has any."""
    bias = _token_bias(states)
    penalised = [i for i, state in enumerate(states) if _is_penalised(state)]
    if bias is None and not penalised:
        return logits
    logits = logits.to(torch.float32, copy=True)
    if bias is not None:
        logits = add_bias(logits, bias.to(logits.device))
    if penalised:
        chosen = _penalties([states[i] for i in penalised], logits)
        logits[penalised] = apply_penalties(logits[penalised], chosen)
    return logits


def _token_bias(states: Sequence[RequestState]) -> TokenBias | None:
    entries = [
        (row, token_id, value)
        for row, state in enumerate(states)
        for token_id, value in _bias_of(state)
    ]
    if not entries:
        return None
    rows, token_ids, values = zip(*entries, strict=True)
    return TokenBias(torch.tensor(rows), torch.tensor(token_ids), torch.tensor(values))


def _bias_of(state: RequestState) -> list[tuple[int, float]]:
    params = state.sampling_params
    entries = list(params.logit_bias)
    if len(state.token_ids) - state.num_prompt_tokens < params.min_tokens:
        entries += [(token_id, _BANNED) for token_id in state.stop_token_ids]
    for word in params.bad_words_token_ids:
        before = list(word[:-1])
        # The last token of a bad word is banned where the others have just come.
        if not before or state.token_ids[-len(before) :] == before:
            entries.append((word[-1], _BANNED))
    return entries


def _is_penalised(state: RequestState) -> bool:
    params = state.sampling_params
    off = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return off != (1.0, 0.0, 0.0)


def _penalties(states: Sequence[RequestState], logits: torch.Tensor) -> Penalties:
    device, shape = logits.device, torch.Size((len(states), logits.shape[1]))
    params = [state.sampling_params for state in states]
    prompts = [state.token_ids[: state.num_prompt_tokens] for state in states]
    outputs = [state.token_ids[state.num_prompt_tokens :] for state in states]
    return Penalties(
        repetition=torch.tensor([p.repetition_penalty for p in params], device=device),
        presence=torch.tensor([p.presence_penalty for p in params], device=device),
        frequency=torch.tensor([p.frequency_penalty for p in params], device=device),
        in_prompt=_counts(prompts, shape, device) > 0,
        output_counts=_counts(outputs, shape, device),
    )


def _counts(
    token_ids: Sequence[Sequence[int]], shape: torch.Size, device: torch.device
) -> torch.Tensor:
    lengths = torch.tensor([len(tokens) for tokens in token_ids])
    rows = torch.arange(len(token_ids)).repeat_interleave(lengths)
    flat = torch.tensor([token for tokens in token_ids for token in tokens], dtype=torch.int64)
    return count_tokens(flat.to(device), rows.to(device), shape)
