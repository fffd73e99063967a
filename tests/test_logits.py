"""Bias, bans and penalties against plain references in float64; log-probabilities too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerctl.runner.logits import Penalties, TokenBias, add_bias, apply_penalties, count_tokens
from runnerctl.runner.logprobs import gather_logprobs

VOCAB_SIZE = 12
token = st.integers(0, VOCAB_SIZE - 1)
row = st.tuples(
    st.lists(token, min_size=1, max_size=8),  # prompt
    st.lists(token, max_size=8),  # output
    st.sampled_from([1.0, 0.5, 1.3, 2.0]),  # repetition
    st.sampled_from([0.0, 0.7, -0.4]),  # presence
    st.sampled_from([0.0, 0.3, -0.2]),  # frequency
)


def penalised_by_reference(logits, prompt, output, repetition, presence, frequency):
    """One row, one logit at a time, in Python floats."""
    changed = []
    for token_id, logit in enumerate(logits):
        value = logit
        if token_id in prompt or token_id in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token_id)
        value -= presence * (token_id in output)
        changed.append(value)
    return changed


def flat(lists):
    """Token ids of all rows, and the row of each."""
    pairs = [(token_id, i) for i, tokens in enumerate(lists) for token_id in tokens]
    return tuple(torch.tensor([p[k] for p in pairs], dtype=torch.int64) for k in (0, 1))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_penalties_of_a_mixed_batch_equal_the_reference(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator) * 3
    prompts, outputs, repetition, presence, frequency = zip(*rows, strict=True)
    penalties = Penalties(
        repetition=torch.tensor(repetition),
        presence=torch.tensor(presence),
        frequency=torch.tensor(frequency),
        in_prompt=count_tokens(*flat(prompts), logits.shape) > 0,
        output_counts=count_tokens(*flat(outputs), logits.shape),
    )
    expected = [
        penalised_by_reference(values, *one)
        for values, one in zip(logits.double().tolist(), rows, strict=True)
    ]
    got = apply_penalties(logits.clone(), penalties).double()
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5
    )


def test_no_penalty_changes_nothing():
    logits = torch.randn(2, VOCAB_SIZE)
    ones, zeros = torch.ones(2), torch.zeros(2)
    seen = torch.ones(2, VOCAB_SIZE)
    same = apply_penalties(logits.clone(), Penalties(ones, zeros, zeros, seen > 0, seen))
    assert torch.equal(same, logits)


def test_bias_touches_the_named_logits_only_and_a_ban_stays_a_ban():
    logits = torch.zeros(3, 4)
    bias = TokenBias(
        rows=torch.tensor([0, 2, 2, 2]),
        token_ids=torch.tensor([1, 3, 0, 0]),
        values=torch.tensor([2.5, -1.0, float("-inf"), 5.0]),
    )
    expected = torch.zeros(3, 4)
    expected[0, 1], expected[2, 3], expected[2, 0] = 2.5, -1.0, float("-inf")
    assert torch.equal(add_bias(logits, bias), expected)


def test_log_probabilities_equal_the_reference():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 2
    tokens = torch.tensor([3, 49, 0, 17])
    counts = [0, 1, 5, 50]
    for i, entry in enumerate(gather_logprobs(logits, tokens, counts)):
        values = logits[i].double().tolist()
        total = math.log(math.fsum(math.exp(value) for value in values))
        reference = [value - total for value in values]
        chosen = int(tokens[i])
        order = sorted(range(50), key=lambda token_id: -reference[token_id])
        assert entry.token_id == chosen
        assert entry.logprob == pytest.approx(reference[chosen], abs=1e-5)
        assert entry.rank == order.index(chosen) + 1
        assert list(entry.top_token_ids) == order[: counts[i]]
        best = [reference[token_id] for token_id in order[: counts[i]]]
        assert entry.top_logprobs == pytest.approx(best, abs=1e-5)
