"""Sampling against plain float64 references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runnerctl.runner.noise import gumbel_noise
from runnerctl.runner.sampler import SamplingBatch, SamplingTraits, _sorted_candidates, sample


def batch(rows):
    """Rows of (temperature, top_k, top_p, min_p, seed, position)."""
    columns = list(zip(*rows, strict=True))
    floats, ints = torch.float32, torch.int64
    kinds = (floats, ints, floats, floats, ints, ints)
    return SamplingBatch(*(torch.tensor(c, dtype=k) for c, k in zip(columns, kinds, strict=True)))


def draw(logits, rows):
    """`sample` for rows as `batch` takes them."""
    traits = SamplingTraits.of([row[:3] for row in rows], torch.device("cpu"))
    return sample(logits, batch(rows), traits)


def kept_by_reference(logits, temperature, top_k, top_p, min_p):
    """The candidates of one row: min-p, then top-k, then top-p over what is left."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    best = scaled[order[0]]
    order = [token for token in order if math.exp(scaled[token] - best) >= min_p]
    if top_k:
        order = order[:top_k]
    top = scaled[order[0]]
    weights = [math.exp(scaled[token] - top) for token in order]
    total, before, kept = math.fsum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if before >= top_p:
            break
        kept.append(token)
        before += weight / total
    return kept


def choose_by_reference(logits, row):
    """The token of one row: the best candidate after adding its noise, in float64."""
    temperature, top_k, top_p, min_p, seed, position = row
    if temperature == 0:
        return max(range(len(logits)), key=lambda token: logits[token])
    kept = kept_by_reference(logits, temperature, top_k, top_p, min_p)
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([kept]))[
        0
    ].double()
    scores = {t: logits[t] / temperature + noise[i].item() for i, t in enumerate(kept)}
    return max(scores, key=lambda token: scores[token])


parameters = st.tuples(
    st.sampled_from([0.0, 0.3, 0.75, 1.5]),
    st.sampled_from([0, 1, 3, 40, 1000]),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.0, 0.05, 0.33, 1.0]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 100_000),
)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(parameters, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_each_row_of_a_mixed_batch_equals_the_reference(rows, seed):
    # wide steps between logits: float32 and float64 agree on every comparison
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(64, generator=generator) / 4.0 for _ in rows])
    tokens = draw(logits, rows).tolist()
    expected = [choose_by_reference(r.tolist(), row) for r, row in zip(logits, rows, strict=True)]
    assert tokens == expected


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    count = 20_000
    rows = [(0.7, 0, 1.0, 0.0, 11, position) for position in range(count)]
    tokens = draw(logits.expand(count, -1), rows)
    observed = torch.bincount(tokens, minlength=5).double()
    expected = torch.softmax(logits.double() / 0.7, 0) * count
    # chi-square with 4 degrees of freedom: 18.5 is exceeded once in a thousand seeds
    assert ((observed - expected) ** 2 / expected).sum().item() < 18.5


def test_top_k_and_top_p_drop_the_tail_and_nothing_else():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    rows = [(1.0, 3, 1.0, 0.0, 5, p) for p in range(3000)]
    drawn = draw(logits.expand(3000, -1), rows)
    assert set(drawn.tolist()) == {0, 1, 2}
    rows = [(1.0, 0, 0.65, 0.0, 5, p) for p in range(3000)]
    drawn = draw(logits.expand(3000, -1), rows)
    assert set(drawn.tolist()) == {0, 1}
    rows = [(1.0, 0, 1.0, 0.6, 5, p) for p in range(3000)]
    assert set(draw(logits.expand(3000, -1), rows).tolist()) == {0, 1}
    share = (drawn == 0).double().mean().item()
    assert share == pytest.approx(4 / 7, abs=0.04)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40])
def test_a_temperature_near_zero_is_nearly_greedy(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0, -4.0, 2.5]])
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.9)):
        rows = [(temperature, top_k, top_p, 0.0, 5, 9)]
        assert draw(logits, rows).tolist() == [1]


def test_a_row_without_limits_keeps_all_its_candidates_beside_rows_that_have_them():
    # three probabilities of a third round up to 1 before the tail comes
    logits = torch.tensor([[0.0] * 3 + [-18.0] * 2]).expand(2, -1)
    kept, _ = _sorted_candidates(
        logits, batch([(1.0, 0, 1.0, 0.0, 5, 9), (1.0, 0, 0.5, 0.0, 5, 9)]), max_top_k=0
    )
    assert kept.isfinite().sum(dim=-1).tolist() == [5, 2]


def test_top_p_keeps_no_more_than_it_takes_to_reach_it():
    logits = torch.zeros(1, 4)
    kept, _ = _sorted_candidates(logits, batch([(1.0, 0, 0.5, 0.0, 5, 9)]), max_top_k=0)
    assert kept.isfinite().sum() == 2


def test_bfloat16_logits_are_sampled_in_float32():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rows = [(0.8, 0, 1.0, 0.0, seed, 3) for seed in range(4)]
    assert torch.equal(draw(logits, rows), draw(logits.float(), rows))
