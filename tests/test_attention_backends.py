"""Core's attention backends, each held to the float64 reference."""

import test_flash_backends as flash
from runnerctl.plugins import PluginHost
from runnerctl.runner.attention.registry import load_backend
from runnerctl.testing import AttentionBackendConformance

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
