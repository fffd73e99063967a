"""What every attention backend is given, and what it must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MetadataT = TypeVar("MetadataT")


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's requests, as packed query tokens over paged keys and values.

    Request `i` has the query tokens `query_start_loc[i] : query_start_loc[i + 1]`,
    which are the last ones of its `seq_lens[i]` tokens.

    The tensors are on the device the model computes on. The host copies are there for
    backends that loop over requests in Python; reading them ties a backend to the step
    it was prepared for, so one that is `capturable` must not.

    Attributes:
        query_start_loc: [num_reqs + 1], int32.
        seq_lens: [num_reqs], int32; computed tokens plus this step's.
        block_table: [num_reqs, max_blocks], int32; the blocks of each request in order
            of position, valid up to its length. The last dimension is contiguous.
        slot_mapping: [num_tokens], int64; where each query token's K and V are written:
            block id x block size + offset.
        max_query_len, max_seq_len: no request of this step has more query tokens, or more
            tokens in all. Bounds, which a captured step sets to what it was captured for.
        query_start_loc_np, seq_lens_np: int32, on the host; the same numbers as the tensors.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_start_loc_np: npt.NDArray[np.int32]
    seq_lens_np: npt.NDArray[np.int32]

    @classmethod
    def from_host(
        cls,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> AttentionBatch:
        """A batch whose lengths were made on the host; the two tensors are on the device."""
        device = slot_mapping.device
        return cls(
            query_start_loc=torch.from_numpy(query_start_loc).to(device),
            seq_lens=torch.from_numpy(seq_lens).to(device),
            block_table=block_table,
            slot_mapping=slot_mapping,
            max_query_len=int((query_start_loc[1:] - query_start_loc[:-1]).max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc_np=query_start_loc,
            seq_lens_np=seq_lens,
        )


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer of a model, as the dry run saw it.

    Attributes:
        layer_idx: as the model counts.
        num_heads, num_kv_heads: query heads, and heads of K and V.
        head_size, head_size_v: of queries and keys, and of values.
        scale: what scores are multiplied by; models differ, never assume head_size ** -0.5.
        sliding_window: a token sees itself and the `sliding_window - 1` before it; None is all.
        softcap: scores become softcap * tanh(scores / softcap); None is off.
        sinks: [num_heads]; the score of one more key per head, which takes its share of the
            softmax and has no value (gpt-oss). None is off.
    """

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """The paged cache of one layer.

    Attributes:
        key: [num_blocks, block_size, num_kv_heads, head_size].
        value: [num_blocks, block_size, num_kv_heads, head_size_v].
    """

    key: torch.Tensor
    value: torch.Tensor

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the K and V of this step's tokens, [num_tokens, num_kv_heads, head size]."""
        self.key.flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.value.flatten(0, 1).index_copy_(0, slot_mapping, value)


class AttentionBackend(ABC, Generic[MetadataT]):
    """A way to compute attention over the paged cache.

    Attributes:
        name: as users spell it.
        capturable: `prepare` and `forward` read no host array of the batch and never wait
            for the device, so that a CUDA graph may capture them.
        needs_finite_cache: it reads slots behind a request's last token in its last block,
            and gives them a weight of 0; what is not finite there would spoil the sum. The
            cache has to be allocated with zeros then.
    """

    name: ClassVar[str]
    capturable: ClassVar[bool] = False
    needs_finite_cache: ClassVar[bool] = False

    def __init__(self, block_size: int) -> None:
        """A backend for caches of `block_size` tokens per block."""
        self.block_size = block_size

    @classmethod
    @abstractmethod
    def why_not(
        cls, layer: AttentionLayer, device: torch.device, dtype: torch.dtype, block_size: int
    ) -> str | None:
        """A sentence that says why this backend cannot serve `layer` here, or None if it can.

        Args:
            layer: of the model.
            device, dtype: where and in what the model computes.
            block_size: tokens per block of the cache.
        """

    def write(
        self,
        cache: LayerKVCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store this step's K and V before `forward` is called; shapes as in `LayerKVCache.write`.

        For backends that have a faster way than the cache's own.
        """
        cache.write(key, value, slot_mapping)

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> MetadataT:
        """What all layers of one step share, computed once."""

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerKVCache,
        layer: AttentionLayer,
        metadata: MetadataT,
    ) -> torch.Tensor:
        """Causal attention of this step's queries over all of each request's tokens.

        Args:
            query: [num_tokens, num_heads, head_size].
            key, value: [num_tokens, num_kv_heads, head_size (_v)], of the query tokens;
                already written to the cache.
            cache: of this layer.
            layer: its constants.
            metadata: from `prepare`.

        Returns:
            [num_tokens, num_heads, head_size_v], in the dtype of `query`.
        """
