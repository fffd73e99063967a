"""What is refused at load because its answers would be wrong, and one call per layer and step."""

import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from runnerctl import LLM, ModelError, SamplingParams
from runnerctl.errors import CannotBePagedError
from runnerctl.runner.attention.interface import ATTN_IMPLEMENTATION, register_attention
from runnerctl.runner.attention.sdpa import SdpaBackend
from runnerctl.runner.model_loader import load_model
from runnerctl.runner.paged_model import PagedModel
from tiny_models import BYPASSING, make_tiny_model


def load(folder, **overrides):
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=ATTN_IMPLEMENTATION, **overrides
    )
    return model.eval()


def page(folder):
    register_attention()
    return PagedModel(
        load_model(
            folder,
            dtype=torch.float32,
            device=torch.device("cpu"),
            trust_remote_code=False,
            attn_implementation=ATTN_IMPLEMENTATION,
        )
    )


@pytest.mark.parametrize("family", BYPASSING)
def test_an_architecture_that_goes_around_the_interface_is_refused_by_name(family, tmp_path):
    folder = make_tiny_model(family, tmp_path)
    with pytest.raises(CannotBePagedError) as caught:
        page(folder)
    assert "ForCausalLM" in str(caught.value) or family in str(caught.value)


def test_a_single_layer_that_computes_its_own_attention_is_found(tmp_path):
    model = load(make_tiny_model("llama", tmp_path))
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match="LlamaForCausalLM ran 2 of its 3 layers"):
        PagedModel(model)


def test_a_layer_that_asks_twice_is_refused(tmp_path):
    model = load(make_tiny_model("llama", tmp_path))
    attention = model.model.layers[1].self_attn
    once = attention.forward
    attention.forward = lambda *args, **kwargs: (once(*args, **kwargs), once(*args, **kwargs))[1]
    with pytest.raises(ModelError, match="twice"):
        PagedModel(model)


def test_an_argument_that_would_not_be_honoured_is_refused(tmp_path):
    model = load(make_tiny_model("llama", tmp_path))
    attention = model.model.layers[0].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: plain(*args, top_p=torch.zeros(4), **kwargs)
    with pytest.raises(ModelError, match="top_p"):
        PagedModel(model)


def test_layers_with_a_window_that_is_not_passed_on_are_refused(tmp_path):
    model = load(make_tiny_model("llama", tmp_path))
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"sliding window in layers \[1\]"):
        PagedModel(model)


def test_chunked_attention_is_refused(tmp_path):
    model = load(make_tiny_model("llama", tmp_path))
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(ModelError, match="chunked_attention"):
        PagedModel(model)


def test_every_step_computes_attention_once_per_layer(tmp_path, monkeypatch):
    calls = []
    forward = SdpaBackend.forward

    def counted(self, query, key, value, cache, layer, metadata):
        calls.append(layer.layer_idx)
        return forward(self, query, key, value, cache, layer, metadata)

    monkeypatch.setattr(SdpaBackend, "forward", counted)
    with LLM(make_tiny_model("qwen2", tmp_path), runner="v1") as llm:
        llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=9, ignore_eos=True))
        assert llm.stats().num_steps == 9
    assert calls == [0, 1, 2] * 9


def test_the_cache_is_let_go_when_the_model_is_closed(tmp_path):
    model = PagedModel(load(make_tiny_model("llama", tmp_path)))
    model.allocate_cache(SdpaBackend(16), num_blocks=4, block_size=16)
    cache = weakref.ref(next(iter(model._attention._caches.values())).key)
    model.close()
    assert cache() is None
    with pytest.raises(RuntimeError, match="outside of a step"):
        model._run(torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))


def test_a_backend_that_needs_a_finite_cache_gets_zeros(tmp_path, monkeypatch):
    """Some kernels read the rest of a sequence's last block: NaN there would be everybody's."""
    empty = torch.empty

    def dirty(*shape, **options):
        is_cache = len(shape) == 4
        return torch.full(shape, float("nan"), **options) if is_cache else empty(*shape, **options)

    monkeypatch.setattr(SdpaBackend, "needs_finite_cache", True)
    monkeypatch.setattr(torch, "empty", dirty)
    folder = make_tiny_model("llama", tmp_path)
    with LLM(folder, runner="v1", num_gpu_blocks_override=4) as llm:
        caches = llm._engine._executor._runner._serving._loaded.model._attention._caches.values()
        assert not any(cache.key.any() or cache.value.any() for cache in caches)
