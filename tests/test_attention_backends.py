"""Every attention backend against the float64 reference."""

import numpy as np
import pytest
import torch

from attention_reference import reference_attention
from runnerctl.errors import UserError
from runnerctl.runner.attention.base import AttentionBatch, AttentionLayer, LayerKVCache
from runnerctl.runner.attention.registry import BACKENDS, choose_backend, load_backend

BLOCK_SIZE = 8
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}
# (tokens in all, of them computed in this step)
MIXES = {
    "decode": [(1, 1), (7, 1), (8, 1), (9, 1), (40, 1)],
    "prefill": [(1, 1), (7, 7), (8, 8), (9, 9), (33, 33)],
    "chunks": [(20, 5), (16, 8), (17, 9), (40, 2)],
    "mixed": [(24, 1), (15, 15), (31, 6), (8, 1), (16, 16)],
}


def pages(lengths, num_kv_heads, head_size, head_size_v, dtype, generator):
    """A cache in which every sequence has shuffled blocks; unused slots are NaN."""
    per_sequence = [-(-length // BLOCK_SIZE) for length in lengths]
    num_blocks = sum(per_sequence) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads)
    cache = LayerKVCache(
        torch.full((*shape, head_size), float("nan"), dtype=dtype),
        torch.full((*shape, head_size_v), float("nan"), dtype=dtype),
    )
    table = torch.zeros(len(lengths), max(per_sequence), dtype=torch.int64)
    for i, count in enumerate(per_sequence):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
    return cache, table


def run(backend_class, mix, heads, head_size, *, head_size_v=None, dtype=torch.float32, **extra):
    """(what the backend says, what the reference says), [T, H, Dv] each."""
    generator = torch.Generator().manual_seed(len(mix) * 1000 + head_size)
    num_heads, num_kv_heads = heads
    head_size_v = head_size_v or head_size
    lengths = [total for total, _ in mix]
    cache, table = pages(lengths, num_kv_heads, head_size, head_size_v, dtype, generator)
    layer = AttentionLayer(0, num_heads, num_kv_heads, head_size, head_size_v, 0.2, **extra)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    queries, new_keys, new_values, slots, expected = [], [], [], [], []
    for i, (total, new) in enumerate(mix):
        keys = random(total, num_kv_heads, head_size)
        values = random(total, num_kv_heads, head_size_v)
        query = random(new, num_heads, head_size)
        where = torch.tensor(
            [table[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(total)]
        )
        old = total - new
        cache.write(keys[:old], values[:old], where[:old])
        queries.append(query)
        new_keys.append(keys[old:])
        new_values.append(values[old:])
        slots.append(where[old:])
        expected.append(reference_attention(query, keys, values, scale=0.2, **extra))
    batch = AttentionBatch(
        query_start_loc_np=np.cumsum([0, *(new for _, new in mix)]).astype(np.int32),
        seq_lens_np=np.array(lengths, np.int32),
        block_table=table,
        slot_mapping=torch.cat(slots),
    )
    backend = backend_class(BLOCK_SIZE)
    key, value = torch.cat(new_keys), torch.cat(new_values)
    cache.write(key, value, batch.slot_mapping)
    output = backend.forward(torch.cat(queries), key, value, cache, layer, backend.prepare(batch))
    return output, torch.cat(expected)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return load_backend(request.param)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    "extra",
    [{}, {"sliding_window": 5}, {"softcap": 0.7}, {"sliding_window": 8, "softcap": 2.0}],
    ids=str,
)
def test_a_ragged_batch_equals_the_reference(backend, mix, heads, extra):
    output, expected = run(backend, mix, heads, 64, **extra)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
def test_head_sizes(backend, head_size):
    output, expected = run(backend, MIXES["mixed"], (4, 2), head_size)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=3e-5)


def test_values_may_be_narrower_than_keys(backend):
    output, expected = run(backend, MIXES["mixed"], (4, 4), 24, head_size_v=12)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 100])
def test_windows_at_block_boundaries(backend, window):
    output, expected = run(backend, MIXES["mixed"], (2, 1), 64, sliding_window=window)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=2e-5)


def test_bfloat16_stays_within_its_own_rounding(backend):
    output, expected = run(backend, MIXES["mixed"], (4, 2), 64, dtype=torch.bfloat16)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=2e-2)


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
