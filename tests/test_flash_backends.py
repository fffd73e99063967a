"""The FlashAttention backends on checking stand-ins of the kernels, which need a GPU."""

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen

from flash_stand_ins import ContractError, fa2_varlen, fa4_varlen, torch_varlen
from runnerctl.runner.attention import flash_attn, prechecks, torch_flash
from runnerctl.runner.attention.base import AttentionLayer
from runnerctl.testing import AttentionBackendConformance

HOPPER, AMPERE, BLACKWELL, TURING = (9, 0), (8, 0), (10, 0), (7, 5)
CPU = torch.device("cpu")


def on_gpu(monkeypatch, capability, *, version_2=None, version_4=None):
    """As if this were a GPU, with these versions of the package, and torch's own kernel."""
    for module in (flash_attn, torch_flash):
        monkeypatch.setattr(module, "compute_capability", lambda device: capability)
    package, cute = ModuleType("flash_attn"), None
    if version_2 is not None:
        package.flash_attn_varlen_func = version_2
    if version_4 is not None:
        cute = ModuleType("flash_attn.cute")
        cute.flash_attn_varlen_func = version_4
    has_any = version_2 is not None or version_4 is not None
    monkeypatch.setitem(sys.modules, "flash_attn", package if has_any else None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(varlen, "varlen_attn", torch_varlen)


class Flash(AttentionBackendConformance):
    dtypes = (torch.float16, torch.bfloat16)
    device = CPU


class TestFlashAttention4(Flash):
    backend = flash_attn.FlashAttnBackend
    block_size = 8

    @pytest.fixture(autouse=True)
    def _gpu(self, monkeypatch):
        on_gpu(monkeypatch, HOPPER, version_4=fa4_varlen)


class TestFlashAttention2(Flash):
    backend = flash_attn.FlashAttnBackend
    block_size = 256

    @pytest.fixture(autouse=True)
    def _gpu(self, monkeypatch):
        on_gpu(monkeypatch, AMPERE, version_2=fa2_varlen)


class TestTorchFlash(Flash):
    backend = torch_flash.TorchFlashBackend
    block_size = 256

    @pytest.fixture(autouse=True)
    def _gpu(self, monkeypatch):
        on_gpu(monkeypatch, HOPPER)


def layer(head_size=64, head_size_v=None, **extra):
    return AttentionLayer(0, 4, 2, head_size, head_size_v or head_size, 0.1, **extra)


def flash_says(one, dtype=torch.bfloat16, block_size=16):
    return flash_attn.FlashAttnBackend.why_not(one, CPU, dtype, block_size)


def torch_says(one, dtype=torch.bfloat16, block_size=256):
    return torch_flash.TorchFlashBackend.why_not(one, CPU, dtype, block_size)


@pytest.mark.parametrize("says", [flash_says, torch_says])
@pytest.mark.parametrize(
    ("capability", "one", "dtype", "why"),
    [
        (None, layer(), torch.bfloat16, "needs an NVIDIA GPU"),
        (TURING, layer(), torch.bfloat16, "8.0 or more, and this GPU has 7.5"),
        (HOPPER, layer(), torch.float32, "in float16 and bfloat16, not in float32"),
        (HOPPER, layer(64, 32), torch.bfloat16, "values of 32 are not as wide as keys of 64"),
        (HOPPER, layer(68), torch.bfloat16, "multiples of 8 from 8 to 256, not 68"),
        (HOPPER, layer(264), torch.bfloat16, "multiples of 8 from 8 to 256, not 264"),
    ],
)
def test_what_no_flash_kernel_takes_is_declined(monkeypatch, says, capability, one, dtype, why):
    on_gpu(monkeypatch, capability, version_2=fa2_varlen, version_4=fa4_varlen)
    assert why in says(one, dtype)


def test_torch_has_no_softcap_and_takes_large_pages_only(monkeypatch):
    on_gpu(monkeypatch, HOPPER)
    assert torch_says(layer()) is None
    assert "no softcap" in torch_says(layer(softcap=30.0))
    assert "pass --block-size 256" in torch_says(layer(), block_size=16)
    assert torch_says(layer(), block_size=512) is None


def test_a_torch_whose_kernel_does_not_page_is_declined_by_its_signature(monkeypatch):
    on_gpu(monkeypatch, HOPPER)
    old = lambda query, key, value, cu_seq_q, *, scale=None, window_size=(-1, -1): query  # noqa: E731
    monkeypatch.setattr(varlen, "varlen_attn", old)
    assert "takes no enable_gqa, seqused_k, block_table" in torch_says(layer())
    monkeypatch.delattr(varlen, "varlen_attn")
    assert "has no torch.nn.attention.varlen" in torch_says(layer())


def test_nothing_installed_is_said_of_both_versions(monkeypatch):
    on_gpu(monkeypatch, HOPPER)
    why = flash_says(layer(), block_size=256)
    assert why == "FlashAttention 4: it is not installed; FlashAttention 2: it is not installed"


def test_an_old_or_broken_package_is_said(monkeypatch):
    on_gpu(monkeypatch, AMPERE, version_2=lambda q, k, v, window_size=None: q)
    assert "too old: it takes no block_table, softcap" in flash_says(layer(), block_size=256)
    broken = ModuleType("flash_attn")
    broken.__getattr__ = lambda name: (_ for _ in ()).throw(OSError("undefined symbol"))
    monkeypatch.setitem(sys.modules, "flash_attn", broken)
    assert "does not import: OSError: undefined symbol" in flash_says(layer(), block_size=256)


@pytest.mark.parametrize(
    ("capability", "one", "block_size", "why"),
    [
        (AMPERE, layer(), 16, "4: it pages on compute capability 9 to 11, not on 8.0"),
        (AMPERE, layer(), 16, "2: its pages hold a multiple of 256 tokens, not 16; pass --block"),
        ((12, 0), layer(), 16, "not on 12.0"),
        (BLACKWELL, layer(192), 16, "up to 128, or 256 with --block-size 128, not 192 with 16"),
        (BLACKWELL, layer(256), 16, "not 256 with 16"),
    ],
)
def test_each_version_gives_its_own_reason(monkeypatch, capability, one, block_size, why):
    on_gpu(monkeypatch, capability, version_2=fa2_varlen, version_4=fa4_varlen)
    assert why in flash_says(one, block_size=block_size)


def test_version_2_takes_what_version_4_does_not(monkeypatch):
    on_gpu(monkeypatch, AMPERE, version_2=fa2_varlen, version_4=fa4_varlen)
    assert flash_says(layer(), block_size=256) is None
    on_gpu(monkeypatch, BLACKWELL, version_2=fa2_varlen, version_4=fa4_varlen)
    assert flash_says(layer(256), block_size=128) is None
    assert flash_says(layer(128), block_size=16) is None


def test_a_machine_without_package_or_gpu_is_told_without_torch(monkeypatch):
    monkeypatch.setattr(prechecks, "_DEVICES", ())
    monkeypatch.setattr(prechecks.shutil, "which", lambda program: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(prechecks, "find_spec", lambda name: None)
    assert prechecks.flash_attn(None).startswith("not installed")
    monkeypatch.setattr(prechecks, "find_spec", lambda name: object())
    assert "none was found" in prechecks.flash_attn(None)
    assert "none was found" in prechecks.torch_flash(None)
    monkeypatch.setattr(prechecks.shutil, "which", lambda program: program)
    assert prechecks.flash_attn(None) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides all GPUs" in prechecks.torch_flash(None)


def test_the_stand_in_for_torch_has_the_signature_of_the_real_one():
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this torch is older than the stand-in")
    assert shape_of(torch_varlen) == shape_of(varlen.varlen_attn)


def test_the_stand_ins_for_the_package_have_the_signatures_of_the_real_ones():
    checked = 0
    for module, stand_in in (("flash_attn", fa2_varlen), ("flash_attn.cute", fa4_varlen)):
        try:
            real = pytest.importorskip(module).flash_attn_varlen_func
        except (pytest.skip.Exception, AttributeError):
            continue
        assert shape_of(stand_in) == shape_of(real)
        checked += 1
    if not checked:
        pytest.skip("no version of flash_attn is installed")


def shape_of(function):
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def call(page_size):
    """Arguments that are right: 3 tokens after 5 and 1 after 300, in shuffled pages."""
    table_width = -(-301 // page_size)
    table = torch.arange(2 * table_width, dtype=torch.int32).flip(0).view(2, table_width)
    lengths = torch.tensor([8, 301], dtype=torch.int32)
    pages = torch.randn(2 * table_width, page_size, 2, 64, dtype=torch.float16)
    return SimpleNamespace(
        q=torch.randn(4, 4, 64, dtype=torch.float16),
        k=pages,
        v=pages.flip(0),
        cu_q=torch.tensor([0, 3, 4], dtype=torch.int32),
        cu_k=torch.tensor([0, 8, 309], dtype=torch.int32),
        lengths=lengths,
        table=table,
    )


def arguments_of(kernel):
    """Arguments that are right, by the names that `kernel` has for them."""
    a = call(256 if kernel is not fa4_varlen else 16)
    if kernel is torch_varlen:
        return {
            "query": a.q, "key": a.k, "value": a.v, "cu_seq_q": a.cu_q, "cu_seq_k": a.cu_k,
            "max_q": 3, "max_k": 301, "scale": 0.1, "window_size": (6, 0), "enable_gqa": True,
            "seqused_k": a.lengths, "block_table": a.table,
        }  # fmt: skip
    common = {
        "q": a.q, "k": a.k, "v": a.v, "cu_seqlens_q": a.cu_q, "max_seqlen_q": 3,
        "max_seqlen_k": 301, "softmax_scale": 0.1, "causal": True, "window_size": (6, 0),
        "softcap": 2.0,
    }  # fmt: skip
    if kernel is fa2_varlen:
        return common | {"cu_seqlens_k": a.cu_k, "block_table": a.table}
    return common | {"seqused_k": a.lengths, "page_table": a.table}


def longer(t):
    return torch.cat([t, t[-1:]])


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


SHARED = [
    ("q", lambda t: t.float(), "half precision"),
    ("q", lambda t: t.bfloat16(), "one dtype"),
    ("q", lambda t: t.unsqueeze(0), "q: tokens"),
    ("q", lambda t: t[..., :56], "head size"),
    ("q", lambda t: t[:, :3], "q: heads"),
    ("q", strided, "contiguous"),
    ("q", longer, "ends at the last token"),
    ("k", lambda t: t.flatten(0, 1), "k: pages"),
    ("v", lambda t: t[:-1], "v: shape"),
    ("v", lambda t: t.bfloat16(), "one dtype"),
    ("cu_seqlens_q", lambda t: t.long(), "int32"),
    ("cu_seqlens_q", lambda t: t + 1, "begins at 0"),
    ("cu_seqlens_q", longer, "shape"),
    ("max_seqlen_q", lambda n: n - 1, "a bound"),
    ("max_seqlen_q", torch.tensor, "an int"),
    ("max_seqlen_k", lambda n: n - 1, "a bound"),
    ("max_seqlen_k", torch.tensor, "an int"),
    ("softmax_scale", lambda x: None, "softmax_scale"),
    ("block_table", lambda t: t.long(), "int32"),
    ("block_table", strided, "contiguous"),
    ("block_table", longer, "shape"),
    ("block_table", lambda t: t[:, :1], "too narrow"),
    ("block_table", lambda t: None, "unpaged"),
]
NAMES = {
    fa2_varlen: {},
    fa4_varlen: {"block_table": "page_table"},
    torch_varlen: {
        "q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q",
        "max_seqlen_q": "max_q", "max_seqlen_k": "max_k", "softmax_scale": "scale",
    },
}  # fmt: skip
OWN = [
    (fa2_varlen, "k", lambda t: t[:, :128], "multiple of 256"),
    (fa2_varlen, "cu_seqlens_k", lambda t: None, "needed"),
    (fa2_varlen, "cu_seqlens_k", lambda t: t.long(), "int32"),
    (fa2_varlen, "cu_seqlens_k", lambda t: t[1:].contiguous(), "shape"),
    (fa2_varlen, "causal", lambda x: False, None),
    (fa2_varlen, "window_size", lambda w: (w[0], 1), "ends at the token"),
    (fa2_varlen, "softcap", lambda x: None, "a float"),
    (fa2_varlen, "dropout_p", lambda x: 0.1, "dropout"),
    (fa4_varlen, "cu_seqlens_k", lambda t: torch.zeros(3, dtype=torch.int32), "not with"),
    (fa4_varlen, "seqused_k", lambda t: None, "needed"),
    (fa4_varlen, "seqused_k", lambda t: t.long(), "int32"),
    (fa4_varlen, "seqused_k", longer, "shape"),
    (fa4_varlen, "causal", lambda x: False, None),
    (fa4_varlen, "window_size", lambda w: (-1, 0), "None, not -1"),
    (fa4_varlen, "window_size", lambda w: (w[0], 1), "ends at the token"),
    (fa4_varlen, "softcap", lambda x: None, "a float"),
    (torch_varlen, "key", lambda t: t[:, :128], "multiple of 256"),
    (torch_varlen, "seqused_k", lambda t: None, "needed"),
    (torch_varlen, "seqused_k", lambda t: t.long(), "int32"),
    (torch_varlen, "cu_seq_k", lambda t: None, "needed"),
    (torch_varlen, "cu_seq_k", lambda t: t * 2, "not the lengths"),
    (torch_varlen, "enable_gqa", lambda x: False, "heads differ"),
    (torch_varlen, "window_size", lambda w: (w[0], -1), "not causal"),
]
CASES = [
    (kernel, NAMES[kernel].get(name, name), change, why)
    for kernel in NAMES
    for name, change, why in SHARED
] + OWN


@pytest.mark.parametrize("kernel", NAMES, ids=lambda f: f.__name__)
def test_the_stand_ins_take_what_is_right(kernel):
    assert torch.isfinite(output(kernel(**arguments_of(kernel)))).all()


def output(answer):
    return answer[0] if isinstance(answer, tuple) else answer


@pytest.mark.parametrize(
    ("kernel", "name", "change", "why"), CASES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_each_item_of_the_contract_is_checked(kernel, name, change, why):
    arguments = arguments_of(kernel)
    if why is None:  # without a window the mask would be lost
        arguments["window_size"] = (-1, -1) if kernel is fa2_varlen else (None, None)
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ContractError, match=why or "not causal"):
        kernel(**arguments)


@pytest.mark.parametrize("head_size", [60, 264])
@pytest.mark.parametrize("kernel", NAMES, ids=lambda f: f.__name__)
def test_head_sizes_are_checked(kernel, head_size):
    arguments = arguments_of(kernel)
    for name in (NAMES[kernel].get(name, name) for name in ("q", "k", "v")):
        tensor = arguments[name]
        arguments[name] = tensor.new_zeros(*tensor.shape[:-1], head_size)
    with pytest.raises(ContractError, match="head size"):
        kernel(**arguments)
