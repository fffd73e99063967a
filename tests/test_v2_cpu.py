"""V2 on a CPU: the paged kernel, layers compiled one by one, and going without a compiler."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import runnerctl_runner_v2.compile as v2_compile
from runnerctl import LLM, SamplingParams
from runnerctl.runner.attention.base import AttentionLayer
from runnerctl.runner.attention.compiled import layer_handle, paged_attention
from runnerctl.testing import AttentionBackendConformance
from runnerctl_runner_v2.cpu import backend as cpu_backend
from runnerctl_runner_v2.cpu import packed_linear
from runnerctl_runner_v2.cpu.backend import CpuPagedBackend
from runnerctl_runner_v2.cpu.build import BuildError, Extension, load_extension
from tiny_models import make_tiny_model, reference_generate

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 3], [17], list(range(40, 75))]
CPU = torch.device("cpu")


def layer(**changes):
    usual = {"layer_idx": 0, "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "head_size_v": 64}
    return AttentionLayer(**(usual | {"scale": 0.125} | changes))


class TestCpuPaged(AttentionBackendConformance):
    backend = CpuPagedBackend


class TestCpuPagedInBfloat16(AttentionBackendConformance):
    backend = CpuPagedBackend
    dtypes = (torch.bfloat16,)


def test_this_machine_builds_the_kernels():
    """Without them the classes above would skip everything."""
    assert isinstance(load_extension(), Extension)


@pytest.mark.parametrize(
    ("device", "dtype", "why"),
    [
        (torch.device("cuda"), torch.float32, "cuda"),
        (CPU, torch.float16, "float16"),
    ],
)
def test_the_kernel_declines_what_it_cannot_compute(device, dtype, why):
    assert why in CpuPagedBackend.why_not(layer(), device, dtype, 16)


def test_without_its_kernel_the_backend_says_why(monkeypatch):
    monkeypatch.setattr(cpu_backend, "load_extension", lambda: "no C++ compiler is found")
    assert CpuPagedBackend.why_not(layer(), CPU, torch.float32, 16) == "no C++ compiler is found"


def operands(**changes):
    """Arguments of `paged_decode` for two requests of 3 and 6 tokens, blocks of 4."""
    given = {
        "output": torch.empty(2, 4, 8),
        "query": torch.randn(2, 4, 8),
        "key_cache": torch.randn(5, 4, 2, 8),
        "value_cache": torch.randn(5, 4, 2, 8),
        "rows": torch.tensor([0, 1]),
        "seq_lens": torch.tensor([3, 6], dtype=torch.int32),
        "block_table": torch.tensor([[2, 0], [4, 1]], dtype=torch.int32),
        "scale": 0.5,
        "window": 0,
        "softcap": 0.0,
    }
    return list((given | changes).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.randn(2, 4, 8, dtype=torch.float64)}, "float32 or bfloat16"),
        ({"value_cache": torch.randn(5, 4, 2, 8, dtype=torch.bfloat16)}, "one type"),
        ({"query": torch.randn(4, 2, 8).transpose(0, 1)}, "contiguous"),
        ({"query": torch.randn(2, 4, 9)}, "head sizes"),
        ({"output": torch.empty(2, 3, 8)}, "heads"),
        ({"block_table": torch.tensor([[2, 0], [4, 1]])}, "int32"),
        ({"rows": torch.tensor([0])}, "same requests"),
    ],
)
def test_the_kernel_refuses_tensors_it_would_misread(changes, message):
    assert isinstance(load_extension(), Extension)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.runnerctl_cpu.paged_decode(*operands(**changes))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_compiled_packed_model_generates_what_transformers_does(family, tmp_path):
    folder = make_tiny_model(family, tmp_path)
    with LLM(folder, runner="v2", dtype="float32") as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        stats = llm.stats()
    expected = [reference_generate(folder, prompt, 12)[0] for prompt in PROMPTS]
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected
    assert stats.attention_backend == "cpu_paged"
    reports = {one.stage: one.report for one in stats.transforms}
    assert "packed" in reports["pack"]
    assert reports["compile"] in ("compiled 3 layers", "compiled 4 layers")


def test_eager_means_nothing_is_built(tmp_path):
    folder = make_tiny_model("llama", tmp_path)
    with LLM(folder, runner="v2", dtype="float32", enforce_eager=True) as llm:
        stats = llm.stats()
        (output,) = llm.generate(PROMPTS[0], GREEDY)
    assert (stats.attention_backend, stats.transforms) == ("sdpa", ())
    assert list(output.outputs[0].token_ids) == reference_generate(folder, PROMPTS[0], 12)[0]


def no_compiler():
    raise BuildError("no C++ compiler is found: install g++, or name one with CXX")


def test_without_a_compiler_v2_serves_and_says_what_it_goes_without(tmp_path, monkeypatch, caplog):
    reason = "no C++ compiler is found"
    monkeypatch.setattr(v2_compile, "find_compiler", no_compiler)
    monkeypatch.setattr(cpu_backend, "load_extension", lambda: reason)
    monkeypatch.setattr(packed_linear, "load_extension", lambda: reason)
    folder = make_tiny_model("llama", tmp_path)
    with LLM(folder, runner="v2", dtype="float32") as llm:
        stats = llm.stats()
        (output,) = llm.generate(PROMPTS[0], GREEDY)
    assert list(output.outputs[0].token_ids) == reference_generate(folder, PROMPTS[0], 12)[0]
    assert stats.attention_backend == "sdpa"
    reports = {one.stage: one.report for one in stats.transforms}
    assert reports["compile"].startswith("layers run eagerly: no C++ compiler")
    assert "install g++" in caplog.text


def test_a_compiler_that_fails_leaves_the_layers_as_they_were(tmp_path, monkeypatch):
    def broken(model, num_tokens):
        failure = OSError("g++: internal error\nand more lines")
        raise BackendCompilerFailed(lambda graph: None, failure, None)

    monkeypatch.setattr(v2_compile, "rehearse", broken)
    folder = make_tiny_model("llama", tmp_path)
    with LLM(folder, runner="v2", dtype="float32") as llm:
        model = llm._engine._executor._runner._model._model
        assert all(one._compiled_call_impl is None for one in v2_compile.decoder_layers(model))
        (report,) = [one.report for one in llm.stats().transforms if one.stage == "compile"]
        (output,) = llm.generate(PROMPTS[0], GREEDY)
    assert report == "layers run eagerly: compiling failed (OSError: g++: internal error)"
    assert list(output.outputs[0].token_ids) == reference_generate(folder, PROMPTS[0], 12)[0]


COMPILE = """
import sys
import runnerctl_runner_v2.cpu.backend as backend, runnerctl_runner_v2.cpu.packed_linear as packed
from runnerctl import LLM
backend.load_extension = packed.load_extension = lambda: "not the kernels, which take long"
with LLM(sys.argv[1], runner="v2") as llm:
    assert llm.stats().transforms[-1].report == "compiled 3 layers"
"""


def test_what_is_compiled_is_kept_in_the_cache_folder(tmp_path):
    folder = make_tiny_model("llama", tmp_path / "model")
    environ = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environ |= {"RUNNERCTL_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", COMPILE, folder], env=environ, check=True)
    assert list((tmp_path / "cache" / "compiled").rglob("*.so"))


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_that_the_user_names_is_left_alone(named, monkeypatch, tmp_path):
    before = str(tmp_path) if named else default_cache_dir()  # torch writes that one itself
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
    v2_compile._keep_what_is_compiled()
    assert (os.environ["TORCHINDUCTOR_CACHE_DIR"] == before) is named


def test_experts_are_not_compiled(tmp_path):
    folder = make_tiny_model("mixtral", tmp_path)
    with LLM(folder, runner="v2", dtype="float32") as llm:
        assert {one.stage for one in llm.stats().transforms} == {"pack"}


class Doubler:
    """Stands for a `PagedAttention`."""

    def attend(self, module, query, key, value):
        return value.transpose(1, 2) * module.factor


def test_one_compiled_graph_serves_every_layer_through_its_own_handle():
    doubler = Doubler()
    layers = [nn.Module() for _ in range(3)]
    for factor, module in enumerate(layers):
        module.factor = factor
        module.handle = layer_handle(module, doubler.attend)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def compiled(value, handle):
        return paged_attention(value, value, value, handle) + 1

    value = torch.ones(1, 2, 5, 4)
    results = [compiled(value, module.handle) for module in layers]
    assert [float(result.unique()) for result in results] == [1.0, 2.0, 3.0]
    assert results[0].shape == (1, 5, 2, 4)
    assert len(graphs) == 1


def test_the_handle_of_a_layer_that_is_gone_is_refused():
    doubler, module = Doubler(), nn.Module()
    module.factor = 1
    handle = layer_handle(module, doubler.attend)
    value = torch.ones(1, 2, 5, 4)
    del doubler
    with pytest.raises(RuntimeError, match="closed"):
        paged_attention(value, value, value, handle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_go_to_their_slots_however_they_lie_in_memory(dtype):
    assert isinstance(load_extension(), Extension)
    rows = torch.randn(1, 3, 70, 8).to(dtype)[0].transpose(0, 1)  # as models hand them over
    pages = torch.zeros(9, 16, 3, 8, dtype=dtype)
    slots = torch.randperm(9 * 16)[:70]
    torch.ops.runnerctl_cpu.write_slots(rows, pages, slots)
    expected = torch.zeros(9 * 16, 3, 8, dtype=dtype).index_copy(0, slots, rows)
    assert torch.equal(pages.flatten(0, 1), expected)
    for wrong in (rows.double(), rows[:, :2], rows.repeat(1, 1, 2)[..., ::2]):
        with pytest.raises(RuntimeError, match="do not fit"):
            torch.ops.runnerctl_cpu.write_slots(wrong, pages, slots)
    with pytest.raises(RuntimeError, match="one int64 slot per row"):
        torch.ops.runnerctl_cpu.write_slots(rows, pages, slots[1:])
