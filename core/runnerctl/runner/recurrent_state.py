"""Recurrent state of many requests: one slot each, next to the paged KV cache.

What a mamba, a short convolution or a linear attention remembers of a request does not
grow with its length, so it is not paged: a request has one slot in every layer's tensors
for as long as it runs. A forward of transformers' model is given a cache made for it: its
recurrent layers hold the state of the requests at hand, its attention layers store
nothing, as attention reads and writes the paged cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from runnerctl.runner.attention.interface import cannot_be_paged

# The two kinds of state a recurrent layer of transformers may have, and their attributes.
_KINDS = ("conv_states", "recurrent_states")

# Layers of these types attend to all tokens or to a window of them, which can be paged.
_PAGED_TYPES = frozenset({"full_attention", "sliding_attention", "hybrid", "hybrid_sliding"})


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache layer of an attention that is paged: hands back what it is given."""

    is_compileable = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is kept."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This forward's keys and values; the paged attention knows the earlier ones."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """0: positions are always given, and requests of one forward differ in length."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of this forward's tokens only."""
        return query_length, 0

    def get_max_length(self) -> int:
        """-1: no bound."""
        return -1

    get_max_cache_shape = get_max_length


class RecurrentAndPagedLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc]
    """A layer that has both."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1) -> None:
        PagedLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of the recurrent part; the paged one keeps nothing."""
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        """Of the recurrent part."""
        LinearAttentionLayer.reset(self)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer of a model keeps.

    Attributes:
        is_recurrent: state of a fixed size.
        is_attention: keys and values per token.
        number_of_states: of the recurrent part.
    """

    is_recurrent: bool
    is_attention: bool
    number_of_states: int = 1

    def make(self) -> Any:
        """An empty cache layer."""
        if self.is_recurrent and self.is_attention:
            return RecurrentAndPagedLayer(self.number_of_states)
        if self.is_recurrent:
            return LinearAttentionLayer(number_of_states=self.number_of_states)
        return PagedLayer()  # or nothing at all, which is kept there as well


def layer_plans(config: PretrainedConfig) -> list[LayerPlan]:
    """What each layer keeps, as transformers' own cache would.

    Args:
        config: of the text model.

    Raises:
        CannotBePagedError: a layer keeps something that is neither recurrent state nor plain keys
            and values.
    """
    plans = []
    layer_types, arguments = get_layer_types_and_kwargs(config)
    if isinstance(arguments, dict):  # of all layers, in transformers before 5.2x
        arguments = [arguments] * len(layer_types)
    for kind, settings in zip(layer_types, arguments, strict=True):
        made = DYNAMIC_LAYER_TYPE_MAPPING.get(kind)
        is_recurrent = made is not None and issubclass(made, LinearAttentionCacheLayerMixin)
        is_attention = made is not None and issubclass(made, CacheLayerMixin)
        if made is None or (is_attention and kind not in _PAGED_TYPES):
            raise cannot_be_paged(
                f"{config.model_type} has layers of type {kind}, which cannot be paged"
            )
        count = settings.get("number_of_states", 1)
        plans.append(LayerPlan(is_recurrent, is_attention, count))
    return plans


class StatePool:
    """The recurrent state of up to `num_slots` requests.

    Args:
        plans: of the model's layers.
        example: a cache that one forward of one request has filled; tells the shapes.
        num_slots: requests that may have state at once.
    """

    def __init__(self, plans: Sequence[LayerPlan], example: Cache, num_slots: int) -> None:
        self._plans = plans
        # (layer, kind, state index) -> [num_slots, ...]
        self._states = {
            place: tensor.new_zeros(num_slots, *tensor.shape[1:])
            for place, tensor in _states_of(plans, example)
        }
        self._free = list(range(num_slots))
        self._slot_of: dict[str, int] = {}

    def slot(self, request_id: str) -> int:
        """The slot of a request, which gets one here if it has none yet.

        Raises:
            RuntimeError: more requests than slots.
        """
        found = self._slot_of.get(request_id)
        if found is None:
            if not self._free:
                raise RuntimeError("more requests have recurrent state than there are slots")
            # The lowest: slots in use lie together, and a batch of them is a view.
            found = self._slot_of[request_id] = heapq.heappop(self._free)
        return found

    def release(self, request_id: str) -> None:
        """Forget a request; one without a slot is nothing to it."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            heapq.heappush(self._free, slot)

    def fresh(self) -> Cache:
        """A cache for a forward of one request that has no state yet."""
        return Cache(layers=[plan.make() for plan in self._plans])

    def load(self, slots: Sequence[int]) -> Cache:
        """A cache with the state of requests, in this order; a forward changes it in place.

        Of slots that follow each other it is the pool's own memory, otherwise a copy.
        """
        cache = self.fresh()
        for (index, kind, state), pooled in self._states.items():
            layer = cache.layers[index]
            rows = _rows(pooled, slots)
            getattr(layer, kind)[state] = rows
            layer.has_previous_state[state] = True
            layer.dtype, layer.device = rows.dtype, rows.device
            if kind == "conv_states":
                layer.is_conv_states_initialized[state] = True
                layer.conv_kernel_size[state] = rows.shape[-1]
            else:
                layer.is_recurrent_states_initialized[state] = True
        return cache

    def store(self, cache: Cache, slots: Sequence[int]) -> None:
        """Keep what a forward made of the state of requests, in the order of `slots`."""
        for (index, kind, state), pooled in self._states.items():
            new = getattr(cache.layers[index], kind)[state]
            rows = _rows(pooled, slots)
            if new.data_ptr() == rows.data_ptr() and new.stride() == rows.stride():
                continue  # changed in place already
            if _follow(slots):
                rows.copy_(new)
            else:
                pooled.index_copy_(0, torch.tensor(slots, device=pooled.device), new)


def state_bytes(plans: Sequence[LayerPlan], example: Cache) -> int:
    """Bytes of one request's recurrent state over all layers; `example` as in `StatePool`."""
    return sum(t.numel() * t.itemsize // t.shape[0] for _, t in _states_of(plans, example))


def _states_of(
    plans: Sequence[LayerPlan], cache: Cache
) -> list[tuple[tuple[int, str, int], torch.Tensor]]:
    return [
        ((index, kind, state), tensor)
        for index, (plan, layer) in enumerate(zip(plans, cache.layers, strict=True))
        if plan.is_recurrent
        for kind in _KINDS
        for state, tensor in getattr(layer, kind).items()
        if tensor is not None
    ]


def _follow(slots: Sequence[int]) -> bool:
    """True if each slot is the one after the last."""
    return slots[-1] - slots[0] == len(slots) - 1 and list(slots) == sorted(slots)


def _rows(pooled: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    """[len(slots), ...] of a pool: a view where the slots follow each other, else a copy."""
    if _follow(slots):
        return pooled[slots[0] : slots[0] + len(slots)]
    return pooled.index_select(0, torch.tensor(slots, device=pooled.device))
