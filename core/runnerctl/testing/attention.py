"""`AttentionBackendConformance`: every attention backend against one float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from runnerctl.runner.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    LayerKVCache,
)
from runnerctl.runner.memory import default_device
from runnerctl.testing.attention_reference import reference_attention

HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}
"""(query heads, KV heads)."""

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "softcap": {"softcap": 0.7},
    "window-and-softcap": {"sliding_window": 8, "softcap": 2.0},
    "sinks": {"has_sinks": True},
    "window-and-sinks": {"sliding_window": 5, "has_sinks": True},
}
MIXES = ("decode", "prefill", "chunks", "mixed")
# far from head_size ** -0.5 for every head size tested, so that it cannot be taken for granted
SCALE = 0.2
# rtol, atol: float32 sums in another order; the other types round what they read and write
TOLERANCES = {
    torch.float32: (1e-5, 3e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
}


@dataclass(frozen=True, slots=True)
class _Step:
    """One step's packed tensors, the cache they read, and the true answer, [T, H, Dv]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: LayerKVCache
    batch: AttentionBatch
    expected: torch.Tensor


class AttentionBackendConformance:
    """Subclass it in a test module, name the backend, and pytest does the rest.

    A layer that the backend's `why_not` declines, with a sentence, is not tested on it.

    Attributes:
        backend: the class under test.
        block_size: tokens per KV block; mixes are made of lengths around it.
        dtypes: what to test in, the exact type first; a case that a type is declined for
            is tried in the next.

    Example:
        class TestMine(AttentionBackendConformance):
            backend = MyBackend
    """

    backend: ClassVar[type[AttentionBackend[Any]]]
    block_size: ClassVar[int] = 16
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    @property
    def device(self) -> torch.device:
        """Where to compute; by default the first GPU, else the CPU."""
        return default_device()

    def make_backend(self) -> AttentionBackend[Any]:
        """An instance of the backend; override it if the class takes something else."""
        construct: Any = self.backend
        made: AttentionBackend[Any] = construct(self.block_size)
        return made

    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("feature", FEATURES)
    def test_a_ragged_batch_equals_the_reference(self, mix: str, heads: str, feature: str) -> None:
        """Decodes, prefills, chunks after a cached prefix, and all of them together."""
        self._check(mix, _layer(HEADS[heads], 64, **FEATURES[feature]))

    @pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
    def test_head_sizes(self, head_size: int) -> None:
        """From 64 to 256."""
        self._check("mixed", _layer((4, 2), head_size))

    def test_values_may_be_narrower_than_keys(self) -> None:
        """As in multi-head latent attention."""
        self._check("mixed", _layer((4, 4), 24, 12))

    @pytest.mark.parametrize("off", [None, -1, 0, 1])
    def test_windows_around_the_block_size(self, off: int | None) -> None:
        """A window of one token, of a block less one, a block, and a block and one."""
        window = 1 if off is None else self.block_size + off
        self._check("mixed", _layer((2, 1), 64, sliding_window=window))

    def test_a_window_longer_than_every_request_changes_nothing(self) -> None:
        """A window cuts off only what lies before it."""
        self._check("mixed", _layer((2, 1), 64, sliding_window=100 * self.block_size))

    @pytest.mark.parametrize("scale", [0.02, 1.5])
    def test_the_scale_is_the_layers(self, scale: float) -> None:
        """Models differ; `head_size ** -0.5` is only the usual one."""
        self._check("mixed", _layer((4, 2), 64, scale=scale))

    def test_reduced_precision_stays_within_its_own_rounding(self) -> None:
        """In the dtype of the query, and no worse than that dtype rounds."""
        for dtype in self.dtypes:
            layer = _layer((4, 2), 64)
            if dtype != torch.float32 and self._accepts(layer, dtype):
                self._compare("mixed", layer, dtype)
                return
        pytest.skip("the backend takes no reduced precision here")

    def test_the_cache_is_read_and_not_written(self) -> None:
        """This step's keys and values are in it already; other requests own the rest."""
        layer = _layer((4, 2), 64)
        step = self._step("mixed", layer, self._dtype(layer))
        before = step.cache.key.clone(), step.cache.value.clone()
        self._forward(step, layer)
        for old, new in zip(before, (step.cache.key, step.cache.value), strict=True):
            assert torch.equal(old.nan_to_num(), new.nan_to_num()), "the backend wrote to the cache"

    def test_one_preparation_serves_all_layers(self) -> None:
        """`prepare` is called once per step; layers of a model differ in window and softcap."""
        layers = [_layer((4, 2), 64, sliding_window=5), _layer((4, 2), 64)]
        dtype = self._dtype(*layers)
        step = self._step("mixed", layers[0], dtype)
        other = self._step("mixed", layers[1], dtype)
        backend = self.make_backend()
        metadata = backend.prepare(step.batch)
        for layer, truth in ((layers[0], step), (layers[1], other), (layers[0], step)):
            output = backend.forward(step.query, step.key, step.value, step.cache, layer, metadata)
            _assert_close(output, truth.expected, dtype)

    def test_what_can_be_captured_prepares_without_waiting_for_the_device(self) -> None:
        """Under fake tensors, whose values nobody can read."""
        if not self.backend.capturable:
            pytest.skip("the backend does not claim to be capturable")
        layer = _layer((4, 2), 64)
        batch = self._step("mixed", layer, self._dtype(layer)).batch
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes: dict[str, Any] = {
                name: mode.from_tensor(value)
                for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
                if isinstance(value := getattr(batch, name), torch.Tensor)
            }
            hidden: Any = _HiddenFromTheDevice()
            self.make_backend().prepare(
                replace(batch, **fakes, query_start_loc_np=hidden, seq_lens_np=hidden)
            )

    def test_it_says_what_it_declines_in_a_sentence(self) -> None:
        """`why_not` is None, or what the user reads when no backend fits."""
        odd = [
            _layer((4, 2), 64),
            _layer((4, 2), 500),
            _layer((4, 4), 24, 12),
            _layer((4, 2), 64, softcap=1.0),
            _layer((4, 2), 64, sliding_window=7),
            _layer((4, 2), 64, has_sinks=True),
        ]
        for layer in odd:
            for dtype in (*self.dtypes, torch.float64):
                self._accepts(layer, dtype)

    def _check(self, mix: str, layer: AttentionLayer) -> None:
        self._compare(mix, layer, self._dtype(layer))

    def _compare(self, mix: str, layer: AttentionLayer, dtype: torch.dtype) -> None:
        step = self._step(mix, layer, dtype)
        _assert_close(self._forward(step, layer), step.expected, dtype)

    def _forward(self, step: _Step, layer: AttentionLayer) -> torch.Tensor:
        backend = self.make_backend()
        batch = step.batch
        if self.backend.capturable:
            hidden: Any = _HiddenFromTheDevice()
            batch = replace(batch, query_start_loc_np=hidden, seq_lens_np=hidden)
        metadata = backend.prepare(batch)
        return backend.forward(step.query, step.key, step.value, step.cache, layer, metadata)

    def _dtype(self, *layers: AttentionLayer) -> torch.dtype:
        """The first type in which all layers are accepted; skips the test if there is none."""
        for dtype in self.dtypes:
            if all(self._accepts(layer, dtype) for layer in layers):
                return dtype
        why = self.backend.why_not(layers[0], self.device, self.dtypes[0], self.block_size)
        pytest.skip(f"declined: {why}")

    def _accepts(self, layer: AttentionLayer, dtype: torch.dtype) -> bool:
        why = self.backend.why_not(layer, self.device, dtype, self.block_size)
        if why is None:
            return True
        is_sentence = isinstance(why, str) and len(why.split()) > 1
        assert is_sentence, f"why_not must say why in a sentence, or be None, not {why!r}"
        return False

    def _step(self, mix: str, layer: AttentionLayer, dtype: torch.dtype) -> _Step:
        step = _make_step(_mixes(self.block_size)[mix], layer, dtype, self.device, self.block_size)
        if not self.backend.needs_finite_cache:
            return step
        # garbage still, but such as a weight of 0 takes away
        for pages in (step.cache.key, step.cache.value):
            pages.nan_to_num_(nan=500.0)
        return step


class _HiddenFromTheDevice:
    """In place of the host's arrays, for backends that promise not to read them."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the backend claims to be capturable and reads a host array ({name})")

    def __getitem__(self, key: object) -> Any:
        raise AssertionError("the backend claims to be capturable and reads a host array")


def _layer(
    heads: tuple[int, int],
    head_size: int,
    head_size_v: int | None = None,
    scale: float = SCALE,
    *,
    has_sinks: bool = False,
    **extra: Any,
) -> AttentionLayer:
    if has_sinks:  # another for each head, from next to nothing to most of the weight
        extra["sinks"] = torch.linspace(-2.0, 4.0, heads[0], device=default_device())
    return AttentionLayer(0, *heads, head_size, head_size_v or head_size, scale, **extra)


def _mixes(b: int) -> dict[str, list[tuple[int, int]]]:
    """For each mix, (tokens in all, of them computed in this step) per request."""
    return {
        "decode": [(1, 1), (b - 1, 1), (b, 1), (b + 1, 1), (5 * b, 1)],
        "prefill": [(1, 1), (b - 1, b - 1), (b, b), (b + 1, b + 1), (2 * b + 1, 2 * b + 1)],
        "chunks": [(2 * b + 4, 5), (2 * b, b), (2 * b + 1, b + 1), (3 * b, 2)],
        "mixed": [(3 * b, 1), (2 * b - 1, 2 * b - 1), (2 * b + 7, 6), (b, 1), (2 * b, 2 * b)],
    }


def _make_step(
    mix: Sequence[tuple[int, int]],
    layer: AttentionLayer,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
) -> _Step:
    """A step over shuffled blocks; slots that hold no token are NaN, and so must not be read."""
    generator = torch.Generator().manual_seed(len(mix) * 1000 + layer.head_size)
    cache, table = _pages([total for total, _ in mix], layer, dtype, generator, block_size)
    parts: list[tuple[torch.Tensor, ...]] = []
    for i, (total, new) in enumerate(mix):
        keys, values, query = (
            torch.randn(*shape, generator=generator).to(dtype)
            for shape in (
                (total, layer.num_kv_heads, layer.head_size),
                (total, layer.num_kv_heads, layer.head_size_v),
                (new, layer.num_heads, layer.head_size),
            )
        )
        position = torch.arange(total)
        slots = table[i, position // block_size] * block_size + position % block_size
        cache.write(keys, values, slots)
        truth = reference_attention(
            query,
            keys,
            values,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )
        parts.append((query, keys[-new:], values[-new:], slots[-new:], truth))
    query, key, value, slot_mapping, expected = (torch.cat(c) for c in zip(*parts, strict=True))
    batch = AttentionBatch.from_host(
        query_start_loc=np.cumsum([0, *(new for _, new in mix)]).astype(np.int32),
        seq_lens=np.array([total for total, _ in mix], np.int32),
        block_table=table.to(device),
        slot_mapping=slot_mapping.to(device),
    )
    cache = LayerKVCache(cache.key.to(device), cache.value.to(device))
    return _Step(query.to(device), key.to(device), value.to(device), cache, batch, expected)


def _pages(
    lengths: Sequence[int],
    layer: AttentionLayer,
    dtype: torch.dtype,
    generator: torch.Generator,
    block_size: int,
) -> tuple[LayerKVCache, torch.Tensor]:
    """A cache full of NaN, and a block table in which every request has shuffled blocks.

    Entries behind a request's blocks point at a block that nobody has.
    """
    per_request = [-(-length // block_size) for length in lengths]
    num_blocks = sum(per_request) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    shape = (num_blocks, block_size, layer.num_kv_heads)
    cache = LayerKVCache(
        torch.full((*shape, layer.head_size), float("nan"), dtype=dtype),
        torch.full((*shape, layer.head_size_v), float("nan"), dtype=dtype),
    )
    table = torch.full((len(lengths), max(per_request)), order.pop(), dtype=torch.int32)
    for i, count in enumerate(per_request):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
    return cache, table


def _assert_close(output: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert output.dtype == dtype, f"the output is {output.dtype}, the query was {dtype}"
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(output.cpu().double(), expected, rtol=rtol, atol=atol)
