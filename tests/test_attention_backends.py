"""Core's attention backends, each held to the float64 reference."""

import pytest
import torch

import test_flash_backends as flash
from runnerctl.plugins import PluginHost
from runnerctl.runner.attention.registry import load_backend
from runnerctl.testing import AttentionBackendConformance
from runnerctl.testing import attention as kit

FLASH = (flash.TestFlashAttention2, flash.TestFlashAttention4, flash.TestTorchFlash)
BACKENDS = PluginHost().attention_backends


class TestSdpa(AttentionBackendConformance):
    backend = load_backend(BACKENDS["sdpa"])
    block_size = 8


def test_no_backend_is_without_its_conformance_tests():
    tested = (TestSdpa, *FLASH)
    assert {one.backend.name for one in tested} == set(BACKENDS)


def test_every_backend_imports_under_the_name_it_is_registered_by():
    assert [load_backend(backend).name for backend in BACKENDS.values()] == list(BACKENDS)


def sdpa_of(step, layer):
    backend = load_backend(BACKENDS["sdpa"])(8)
    metadata = backend.prepare(step.batch)
    output = backend.forward(step.query, step.key, step.value, step.cache, layer, metadata)
    return output, metadata


@pytest.mark.parametrize("extra", [{}, {"sliding_window": 300}, {"softcap": 0.7}])
@pytest.mark.parametrize("more", [[], [(60, 7)]])
def test_decodes_of_very_different_lengths_are_answered_in_their_places(extra, more):
    """Such a step is cut into groups, in an order that is not the batch's."""
    mix = [(30, 1), (900, 1), (3, 1), *more, (880, 1), (290, 1)]
    layer = kit._layer((4, 2), 64, **extra)
    step = kit._make_step(mix, layer, torch.float32, torch.device("cpu"), 8)
    output, metadata = sdpa_of(step, layer)
    assert len(metadata.decodes) > 1
    kit._assert_close(output, step.expected, torch.float32)


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("extra", [{}, {"sliding_window": 5}, {"softcap": 0.7}])
def test_what_is_not_a_number_stays_with_the_request_that_made_it(broken, extra):
    """Among decodes that are padded to one length."""
    layer = kit._layer((4, 2), 64, **extra)
    lengths = [20, 14, 11]
    step = kit._make_step([(n, 1) for n in lengths], layer, torch.float32, torch.device("cpu"), 8)
    owned = step.batch.block_table[broken, : -(-lengths[broken] // 8)]
    step.cache.key[owned] = step.cache.value[owned] = float("nan")
    output, metadata = sdpa_of(step, layer)
    assert len(metadata.decodes) == 1
    assert output[broken].isnan().all()
    others = [i for i in range(3) if i != broken]
    kit._assert_close(output[others], step.expected[others], torch.float32)
