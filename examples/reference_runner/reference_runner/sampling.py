"""The next token of one sequence, by the functions that all runners share.

Sharing them matters: the same seed then says the same on every runner.
"""

import torch

from runnerctl.runner.logits import Penalties, TokenBias, add_bias, apply_penalties, count_tokens
from runnerctl.runner.logprobs import gather_logprobs
from runnerctl.runner.sampler import SamplingBatch, SamplingTraits, sample

BANNED = float("-inf")


def next_token(logits, sequence):
    """The token, and its `TokenLogprobs` or None. `logits` are [1, vocab_size], as computed."""
    params, device = sequence.params, logits.device
    batch = SamplingBatch(
        temperature=torch.tensor([params.temperature], dtype=torch.float32),
        top_k=torch.tensor([params.top_k]),
        top_p=torch.tensor([params.top_p], dtype=torch.float32),
        min_p=torch.tensor([params.min_p], dtype=torch.float32),
        seeds=torch.tensor([params.seed]),
        # the index that the token will have: with the seed it makes the noise
        positions=torch.tensor([len(sequence.token_ids)]),
    )
    traits = SamplingTraits.of([(params.temperature, params.top_k, params.top_p)], device)
    token = sample(processed(logits, sequence), batch.to(device), traits)
    if params.logprobs is None:
        return int(token), None
    # from the logits as the model gave them
    return int(token), gather_logprobs(logits, token, [params.logprobs])[0]


def processed(logits, sequence):
    """Logits after bias and bans, then penalties."""
    params = sequence.params
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    bias = list(params.logit_bias)
    if len(output) < params.min_tokens:
        bias += [(token, BANNED) for token in sequence.stop_token_ids]
    for *start, last in params.bad_words_token_ids:
        if sequence.token_ids[len(sequence.token_ids) - len(start) :] == start:
            bias.append((last, BANNED))
    logits = logits.to(torch.float32, copy=True)
    if bias:
        tokens, values = zip(*bias, strict=True)
        rows = torch.zeros(len(tokens), dtype=torch.int64)
        add_bias(
            logits, TokenBias(rows, torch.tensor(tokens), torch.tensor(values)).to(logits.device)
        )
    penalties = Penalties(
        repetition=torch.tensor([params.repetition_penalty], device=logits.device),
        presence=torch.tensor([params.presence_penalty], device=logits.device),
        frequency=torch.tensor([params.frequency_penalty], device=logits.device),
        in_prompt=counts(prompt, logits) > 0,
        output_counts=counts(output, logits),
    )
    return apply_penalties(logits, penalties)


def prompt_logprobs(logits, sequence, start, end):
    """Of the prompt tokens that follow those at `start` to `end` - 1; and where they begin."""
    following = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)]
    rows = logits[start : start + len(following)]
    tokens = torch.tensor(following, device=logits.device)
    top = [sequence.params.prompt_logprobs] * len(following)
    return start + 1, gather_logprobs(rows, tokens, top)


def counts(token_ids, logits):
    """[1, vocab_size]: how often each token occurs."""
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    return count_tokens(tokens, torch.zeros_like(tokens), logits.shape)
