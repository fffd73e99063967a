"""Which attention backends there are, each held to the float64 reference."""

import pytest
import torch

from runnerctl.errors import UserError
from runnerctl.runner.attention.base import AttentionLayer
from runnerctl.runner.attention.registry import BACKENDS, choose_backend, load_backend
from runnerctl.testing import AttentionBackendConformance


class TestSdpa(AttentionBackendConformance):
    backend = load_backend("sdpa")
    block_size = 8


def test_no_backend_is_without_its_conformance_tests():
    assert {TestSdpa.backend.name} == set(BACKENDS)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(UserError) as caught:
        choose_backend(
            "sdpaa", [], torch.device("cpu"), torch.float32, setting="RUNNERCTL_ATTENTION_BACKEND"
        )
    assert "did you mean 'sdpa'" in str(caught.value)
    assert caught.value.setting == "RUNNERCTL_ATTENTION_BACKEND"


def test_a_backend_that_cannot_serve_a_layer_says_why(monkeypatch):
    layer = AttentionLayer(0, 4, 2, 64, 64, 0.1)
    sdpa = load_backend("sdpa")
    monkeypatch.setattr(sdpa, "why_not", classmethod(lambda *_: "the layer is too wide"))
    with pytest.raises(UserError, match="sdpa: the layer is too wide"):
        choose_backend("auto", [layer], torch.device("cpu"), torch.float32, setting="-")


def test_the_table_names_the_backends_as_they_name_themselves():
    assert {name: load_backend(name).name for name in BACKENDS} == {name: name for name in BACKENDS}
