"""Packed linear layers: exact enough, traceable, and announced when they cannot be had."""

from __future__ import annotations

import logging
import os
import stat

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from runnerctl_runner_v2.cpu import build, packed_linear  # noqa: E402
from runnerctl_runner_v2.cpu.build import BuildError, Extension  # noqa: E402
from runnerctl_runner_v2.cpu.onednn_linear import OneDnnLinear, onednn_serves  # noqa: E402
from runnerctl_runner_v2.cpu.packed_linear import PackedLinear, pack_linears  # noqa: E402
from tiny_models import make_tiny_model  # noqa: E402

SHAPES = [(1, 1), (15, 7), (17, 131), (48, 33), (130, 64), (50, 1537)]  # out, in features


@pytest.fixture(scope="module")
def kernel():
    extension = packed_linear.load_packed_linear()
    assert isinstance(extension, Extension), extension  # a compiler is part of a test machine
    return extension


@pytest.fixture
def no_kernel(monkeypatch):
    monkeypatch.setattr(packed_linear, "load_extension", lambda: "no C++ compiler is found")


def linear(out_features, in_features, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias).to(dtype).requires_grad_(False)


def assert_close_to_float64(module, x, y):
    """The bounds of rounding: of a float32 sum in any order, then of the result's dtype."""
    weight, inputs = module.weight.double(), x.double()
    bias = 0 if module.bias is None else module.bias.double()
    expected = inputs @ weight.T + bias
    magnitude = inputs.abs() @ weight.abs().T + abs(bias)
    bound = magnitude * (module.in_features + 1) * 2**-24
    if y.dtype == torch.bfloat16:
        bound = bound + (expected.abs() + bound) * 2**-8
    assert y.shape == expected.shape
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_layer_is_the_plain_one_up_to_rounding(kernel, shape, dtype):
    for bias in (True, False):
        module = linear(*shape, dtype, bias)
        packed = PackedLinear(module)
        for rows in (1, 2, 3, 4, 5, 7, 13, 96, 97, 130):
            x = torch.randn(rows, shape[1]).to(dtype)
            y = packed(x)
            assert y.dtype == dtype
            assert_close_to_float64(module, x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_other_rows_or_on_threads(kernel, dtype):
    packed = PackedLinear(linear(200, 1100, dtype))
    x = torch.randn(130, 1100).to(dtype)
    whole = packed(x)
    for rows in range(1, 14):
        assert torch.equal(packed(x[:rows]), whole[:rows])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 3)
        assert torch.equal(packed(x), whole)
    finally:
        torch.set_num_threads(threads)


def test_any_shape_and_stride_of_x(kernel):
    module = linear(20, 24)
    packed = PackedLinear(module)
    base = torch.randn(4, 24, 10)
    for x in (base.transpose(1, 2), base[:, :, 0], base[0, :, 0], torch.empty(0, 24)):
        assert_close_to_float64(module, x, packed(x))


def test_bfloat16_results_round_to_nearest_even_and_keep_nan_and_infinity(kernel):
    packed = PackedLinear(linear(1, 1, torch.bfloat16, bias=False))
    packed.packed.fill_(1.0)
    values = torch.tensor([[1.0], [float("nan")], [float("inf")], [-0.0]], dtype=torch.bfloat16)
    assert torch.equal(packed(values).nan_to_num(7.0), values.nan_to_num(7.0))
    one, half_step = torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([2.0**-8])
    packed.bias = half_step
    assert packed(one).item() == 1.0  # to even
    packed.bias = half_step * 3
    assert packed(one).item() == 1.0 + 2.0**-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_plain_weight_can_still_be_read_and_the_dtype_not_changed(kernel, dtype):
    module = linear(37, 19, dtype)
    packed = PackedLinear(module)
    assert torch.equal(packed.weight, module.weight)
    assert packed.to(dtype) is packed
    with pytest.raises(RuntimeError, match="cannot change"):
        packed.to(torch.float64)


def test_arguments_that_do_not_fit_are_refused(kernel):
    packed = PackedLinear(linear(20, 24))
    call = torch.ops.runnerctl_cpu.packed_linear
    for x, out_features in (
        (torch.ones(2, 23), 20),
        (torch.ones(2, 24), 200),
        (torch.ones(2, 24, dtype=torch.float64), 20),
    ):
        with pytest.raises(RuntimeError, match="packed_linear"):
            call(x, packed.packed, None, out_features)


def test_fake_tensors_get_shape_and_dtype(kernel):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 5, 24, dtype=torch.bfloat16)
        y = torch.ops.runnerctl_cpu.packed_linear(x, torch.empty(2, 24, 16), None, 20)
    assert (y.shape, y.dtype) == ((2, 5, 20), torch.bfloat16)


@pytest.mark.parametrize("kind", [PackedLinear, OneDnnLinear])
def test_a_graph_traces_through_without_a_break(kernel, kind):
    if kind is OneDnnLinear and not onednn_serves(torch.float32):
        pytest.skip("this torch packs nothing with oneDNN")
    module = nn.Sequential(kind(linear(24, 24)), nn.SiLU(), kind(linear(24, 24)))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for rows in (3, 9):
            x = torch.randn(rows, 24)
            torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=1e-6)


def load_tiny(folder, **changes):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_a_model_keeps_its_logits(kernel, family, tmp_path):
    model = load_tiny(make_tiny_model(family, tmp_path))
    ids = torch.arange(40).reshape(2, 20)
    with torch.inference_mode():
        before = model(ids).logits
        report = pack_linears(model)
        torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=1e-4)
    assert report.endswith("linear layers packed for the compiled CPU kernel")
    assert not [m for m in model.modules() if type(m) is nn.Linear]
    assert pack_linears(model) is None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.head = linear(40, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.head
        self.special = nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8)
        self.hooked = nn.Linear(8, 8)
        self.hooked.register_forward_hook(lambda *_: None)
        self.double = nn.Linear(8, 8, dtype=torch.float64)


def test_tied_weights_stay_with_the_embedding_and_unknown_layers_stay(kernel):
    model = Tied()
    weight = model.embedding.weight
    stays = (model.special, model.hooked, model.double)
    assert pack_linears(model).startswith("1 linear layer")
    assert model.embedding.weight is weight
    assert isinstance(model.head, PackedLinear)
    assert model.again is model.head
    assert torch.equal(model.head.weight, weight)
    assert (model.special, model.hooked, model.double) == stays


def test_each_plain_weight_is_freed_before_the_next_is_packed(kernel, monkeypatch):
    import weakref

    model = nn.Sequential(*(linear(8, 8) for _ in range(5)))
    plain = [weakref.ref(module) for module in model]
    alive = []

    class Counting(PackedLinear):
        def __init__(self, module):
            alive.append(sum(ref() is not None for ref in plain))
            super().__init__(module)

    monkeypatch.setattr(packed_linear, "PackedLinear", Counting)
    pack_linears(model)
    assert alive == [5, 4, 3, 2, 1]


def test_without_a_compiler_float32_goes_to_onednn_and_bfloat16_stays(no_kernel, monkeypatch):
    monkeypatch.setattr(packed_linear, "_has_bfloat16_instructions", lambda: False)
    model = nn.Sequential(linear(24, 24, torch.bfloat16))
    assert pack_linears(model) == "1 linear layers not packed: no C++ compiler is found"
    assert type(model[0]) is nn.Linear
    if not onednn_serves(torch.float32):
        pytest.skip("this torch packs nothing with oneDNN")
    module = linear(24, 24)
    model = nn.Sequential(module)
    assert "oneDNN (no C++ compiler is found)" in pack_linears(model)
    x = torch.randn(5, 24)
    with torch.inference_mode():
        assert_close_to_float64(module, x, model(x))
    assert torch.equal(model[0].weight, module.weight)


def test_without_onednn_nothing_is_packed(no_kernel, monkeypatch):
    monkeypatch.setattr(packed_linear, "onednn_serves", lambda dtype: False)
    model = nn.Sequential(linear(24, 24))
    assert "not packed: no C++ compiler" in pack_linears(model)
    assert type(model[0]) is nn.Linear


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """A compiler that writes a line per call, and fails where the file `broken` is."""
    script = tmp_path / "cxx"
    script.write_text(
        "#!/bin/sh\n"
        f'echo called >> "{tmp_path}/calls"\n'
        f'if [ -e "{tmp_path}/broken" ]; then echo "boom in line 3" >&2; exit 4; fi\n'
        'while [ "$1" != -o ]; do shift; done; : > "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("RUNNERCTL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def calls(folder):
    return len((folder / "calls").read_text().splitlines())


def test_the_second_build_is_the_first_ones(fake_compiler, monkeypatch, capsys):
    first = build.build_extension()
    compiled = calls(fake_compiler)
    assert (first.build_seconds > 0, first.path.is_file()) == (True, True)
    assert capsys.readouterr().err == "Building kernels for this CPU, once\n"
    assert build.build_extension() == Extension(first.path, 0.0)
    assert calls(fake_compiler) == compiled
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert build.build_extension().path != first.path


def test_changed_sources_are_another_build(fake_compiler, tmp_path, monkeypatch):
    first = build.build_extension()
    (tmp_path / "one.cpp").write_text("// another")
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    second = build.build_extension()
    (tmp_path / "one.cpp").write_text("// changed")
    assert len({first.path, second.path, build.build_extension().path}) == 3


def test_a_compiler_that_fails_is_one_line_and_leaves_nothing(fake_compiler, caplog):
    (fake_compiler / "broken").touch()
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(BuildError, match=r"cxx failed on the CPU operators \(exit status 4"):
            build.build_extension()
        reason = build.load_extension.__wrapped__()
    assert isinstance(reason, str)
    assert "\n" not in reason
    assert "boom in line 3" in caplog.text
    assert not [p for p in (fake_compiler / "cache" / "cpu_operators").iterdir() if p.is_dir()]
    (fake_compiler / "broken").unlink()
    assert build.build_extension().path.is_file()


def test_no_compiler_is_a_reason_that_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "install g++, or name one with CXX" in build.load_extension.__wrapped__()
    monkeypatch.setenv("CXX", "clang-from-mars")
    assert "CXX names 'clang-from-mars'" in build.load_extension.__wrapped__()


def test_a_cache_that_cannot_be_written_is_a_reason(fake_compiler, monkeypatch):
    (fake_compiler / "file").touch()
    monkeypatch.setenv("RUNNERCTL_CACHE_DIR", os.fspath(fake_compiler / "file"))
    assert "cannot be written" in build.load_extension.__wrapped__()


def test_a_library_that_does_not_load_is_a_reason(fake_compiler):
    assert "cannot be loaded" in build.load_extension.__wrapped__()


@pytest.mark.parametrize(
    ("instructions", "kind"),
    [({"avx512_bf16"}, PackedLinear), ({"avx512_bf16", "amx_tile"}, OneDnnLinear)],
    ids=["AVX512-BF16", "AMX"],
)
def test_bfloat16_goes_to_whoever_uses_the_instructions_best(
    kernel, monkeypatch, instructions, kind
):
    if not (torch.ops.runnerctl_cpu.dots_bfloat16(2) and onednn_serves(torch.bfloat16)):
        pytest.skip("this CPU has no instructions for bfloat16")
    monkeypatch.setattr(packed_linear, "_supports", instructions.__contains__)
    model = nn.Sequential(linear(24, 24, torch.bfloat16))
    assert "bfloat16 instructions" in pack_linears(model)
    assert type(model[0]) is kind
