"""What the right tokens are: greedy ones by transformers, sampled ones by core's own noise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.testing.tiny_models import VOCAB_SIZE, reference_generate, reference_model

NEAR_TIE = 1e-4
"""Where the reference's two best candidates are closer than this, float32 may part."""

MAX_TOKENS = 12

Reference = tuple[list[int], list[float]]
"""Tokens, and for each the gap between the best candidate and the next."""


def make_prompts(lengths: Sequence[int], seed: int = 7) -> list[list[int]]:
    """Prompts of random tokens, one per length; the model's special tokens are left out."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def greedy(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    """Parameters of a request that takes the likeliest token, past the end token too."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)


def seeded(seed: int, max_tokens: int = MAX_TOKENS) -> SamplingParams:
    """Parameters of a request that draws its tokens, reproducibly."""
    return SamplingParams(temperature=0.9, max_tokens=max_tokens, ignore_eos=True, seed=seed)


def reference_tokens(folder: Path, prompt: Sequence[int], params: SamplingParams) -> Reference:
    """The right tokens of a request, in float32.

    Args:
        folder: a checkpoint.
        prompt: token ids.
        params: of `greedy` or `seeded`.
    """
    return _reference_tokens(folder, tuple(prompt), params)


@lru_cache(maxsize=512)
def _reference_tokens(folder: Path, prompt: tuple[int, ...], params: SamplingParams) -> Reference:
    if params.is_greedy:
        return reference_generate(folder, list(prompt), params.max_tokens)
    return _draw(folder, list(prompt), params)


def _draw(folder: Path, prompt: list[int], params: SamplingParams) -> Reference:
    """Gumbel-max by the noise of `runnerctl.runner.noise`, the whole sequence at each step."""
    import torch

    from runnerctl.runner.noise import gumbel_noise

    model = reference_model(folder)
    tokens, gaps = list(prompt), []
    vocabulary = torch.arange(VOCAB_SIZE).unsqueeze(0)
    with torch.inference_mode():
        for _ in range(params.max_tokens):
            logits = model(torch.tensor([tokens])).logits[:, -1].float()
            seed, position = torch.tensor([params.seed]), torch.tensor([len(tokens)])
            scores = logits / params.temperature + gumbel_noise(seed, position, vocabulary)
            best = scores.topk(2, dim=-1)
            tokens.append(int(best.indices[0, 0]))
            gaps.append(float(best.values[0, 0] - best.values[0, 1]))
    return tokens[len(prompt) :], gaps


def reference_logprobs(folder: Path, token_ids: Sequence[int]) -> list[float]:
    """The log-probability of every token to come after these, in float32, before sampling."""
    import torch

    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([list(token_ids)])).logits[0, -1]
    logprobs: list[float] = logits.float().log_softmax(dim=-1).tolist()
    return logprobs


def assert_tokens(said: Sequence[int], expected: Reference, what: str) -> None:
    """Compare a request's tokens with the reference, up to a near tie.

    Args:
        said: what the runner gave, all of it or the beginning.
        expected: of `reference_tokens`.
        what: names the request, for the message.

    Raises:
        AssertionError: they part where they may not.
    """
    tokens, gaps = expected
    assert len(said) <= len(tokens), f"{what} got {len(said)} tokens of {len(tokens)}"
    for i, (token, right) in enumerate(zip(said, tokens, strict=False)):
        if token != right:
            assert gaps[i] < NEAR_TIE, (
                f"{what}: token {i} is {token}, the reference has {right} "
                f"(by {gaps[i]:.4f}); so far {list(said[:i])}"
            )
            # behind a tie the two are different texts
            return
