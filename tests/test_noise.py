"""The noise: a function of seed, position and token alone, and distributed as it should be."""

import math

import pytest
import torch

from runnerctl.runner.noise import gumbel_noise


def noise(seeds, positions, num_tokens):
    return gumbel_noise(
        torch.tensor(seeds), torch.tensor(positions), torch.arange(num_tokens).unsqueeze(0)
    )


def test_a_row_does_not_depend_on_its_neighbours_or_on_which_candidates_are_asked_for():
    together = noise([5, 6, 7], [10, 20, 30], 1000)
    assert torch.equal(noise([6], [20], 1000)[0], together[1])
    candidates = torch.tensor([[999, 3, 500]])
    some = gumbel_noise(torch.tensor([6]), torch.tensor([20]), candidates)
    assert torch.equal(some[0], together[1, candidates[0]])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 5), (2, 5)),
        ((1, 5), (1, 6)),
        ((1, 5), (5, 1)),
        ((1, 5), (1 + 2**32, 5)),  # the upper half of the seed counts
        ((0, 0), (-1, 0)),
        ((-(2**63), 3), (2**63 - 1, 3)),
    ],
)
def test_another_seed_or_position_gives_unrelated_noise(left, right):
    a, b = noise([left[0]], [left[1]], 20_000)[0], noise([right[0]], [right[1]], 20_000)[0]
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(20_000)


def test_the_values_follow_the_gumbel_distribution():
    values = noise([3], [7], 200_000)[0].double()
    assert torch.isfinite(values).all()
    # exp(-exp(-g)) is uniform: compare its histogram with a flat one (chi-square, 99 degrees)
    uniform = torch.exp(-torch.exp(-values))
    counts = torch.histc(uniform, bins=100, min=0, max=1)
    chi_square = ((counts - 2000) ** 2 / 2000).sum().item()
    assert 50 < chi_square < 170
    assert values.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)


def test_one_token_over_many_positions_is_as_random_as_many_tokens():
    positions = torch.arange(100_000)
    values = gumbel_noise(torch.full_like(positions, 42), positions, torch.tensor([[17]]))
    uniform = torch.exp(-torch.exp(-values.double().flatten()))
    counts = torch.histc(uniform, bins=50, min=0, max=1)
    assert 15 < ((counts - 2000) ** 2 / 2000).sum().item() < 100
    lag = torch.corrcoef(torch.stack([uniform[:-1], uniform[1:]]))[0, 1].item()
    assert abs(lag) < 5 / math.sqrt(100_000)
