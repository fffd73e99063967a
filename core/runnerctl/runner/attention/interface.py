"""The way into transformers' models: our attention, registered in their `AttentionInterface`.

A model asks its attention function for the output of one layer and knows nothing
of paging. `PagedAttention` belongs to one model: it keeps the layers' caches and,
for the length of a step, that step's metadata. The name is not registered in
`AttentionMaskInterface`, so the models build no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from runnerctl.errors import CannotBePagedError
from runnerctl.runner.attention.base import AttentionBackend, AttentionLayer, LayerKVCache
from runnerctl.runner.attention.compiled import layer_handle, paged_attention
from runnerctl.runner.attention.sdpa import attend

Exchange = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

ATTN_IMPLEMENTATION = "runnerctl_paged"

# Keyword arguments that carry nothing the paged path would have to honour: positions
# are already in the queries and keys, and outputs or caches are not asked for.
_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "dropout",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_HONOURED = frozenset({"scaling", "sliding_window", "softcap", "is_causal", "s_aux"})


def cannot_be_paged(why: str) -> CannotBePagedError:
    """The refusal of an architecture whose answers would be wrong, with what to do instead."""
    return CannotBePagedError(why, remedy="take another model")


class PagedAttention:
    """The attention of one model: caches per layer, metadata per step.

    Life: `observe` a forward to learn the layers, `bind` their caches, then run
    every forward inside `step`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[nn.Module, AttentionLayer] = {}
        self._caches: dict[nn.Module, LayerKVCache] = {}
        self._observing = False
        self._rehearsing = False
        self._unpaged = False
        self._backend: AttentionBackend[Any] | None = None
        self._metadata: Any = None
        for module in model.modules():
            # Any module may be the one that calls; only the calls will tell.
            module.__dict__["_paged_attention"] = self
            module.__dict__["_paged_handle"] = None

    @property
    def layers(self) -> list[AttentionLayer]:
        """The layers in the order in which the model runs them."""
        return list(self._layers.values())

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Within this, calls compute nothing and are written down.

        Raises:
            CannotBePagedError: an argument came that the paged path would not honour.
        """
        self._observing = True
        try:
            yield
        finally:
            self._observing = False

    @contextmanager
    def rehearse(self) -> Iterator[None]:
        """Within this, attention is zeros: forwards that compile or measure need no cache."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    @contextmanager
    def unpaged(self) -> Iterator[None]:
        """Within this, queries attend to the keys and values they come with, of one request."""
        self._unpaged = True
        try:
            yield
        finally:
            self._unpaged = False

    def bind(self, backend: AttentionBackend[Any], caches: list[LayerKVCache]) -> None:
        """Give each layer, in the order of `layers`, its cache."""
        self._backend = backend
        self._caches = dict(zip(self._layers, caches, strict=True))

    @contextmanager
    def step(
        self, metadata: Any, slot_mapping: torch.Tensor, exchange: Exchange | None = None
    ) -> Iterator[None]:
        """Within this, forwards read and write the paged cache.

        Args:
            metadata: from the backend's `prepare`.
            slot_mapping: [num_tokens], int64.
            exchange: what to do to keys and values before they are written, where a rank
                runs some of the tokens only; see `BatchShare.exchange_kv`.

        Raises:
            RuntimeError: a step of this model is already under way.
        """
        if self._metadata is not None:
            raise RuntimeError("a step of this model is already under way")
        self._metadata = (metadata, slot_mapping, exchange)
        try:
            yield
        finally:
            self._metadata = None

    def close(self) -> None:
        """Let go of all caches and of the model."""
        self._caches.clear()
        # The modules know us: a cycle would keep the weights until a garbage collection.
        self._layers.clear()
        self._backend = None

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """One layer of one step.

        Args:
            module: the calling layer.
            query: [B, num_heads, S, head_size]; row after row these are the tokens of the
                step: packed as one row, or one token of each request as B rows.
            key, value: [B, num_kv_heads, S, head_size (_v)].

        Returns:
            [B, S, num_heads, head_size_v].
        """
        if self._rehearsing:
            return _zeros(query, value)
        if self._unpaged:
            return self._attend_unpaged(module, query, key, value)
        if self._backend is None or self._metadata is None:
            raise RuntimeError("a forward of a paged model outside of a step")
        metadata, slot_mapping, exchange = self._metadata
        cache = self._caches[module]
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        # [B, H, S, D] -> [B * S, H, D]
        query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        written = exchange(key, value) if exchange else (key, value)
        self._backend.write(cache, written[0], written[1], slot_mapping)
        layer = self._layers[module]
        output = self._backend.forward(query, key, value, cache, layer, metadata)
        return output.view(shape)

    def _attend_unpaged(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """As `attend`, over these keys and values alone; the queries are the last tokens."""
        layer = self._layers[module]
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        return attend(q, k, v, layer).unsqueeze(0)

    def note(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Write down one layer; the shapes are those of `attend`, the result is zeros."""
        name = type(module).__name__
        if module in self._layers:
            raise cannot_be_paged(
                f"{name} runs attention twice in one forward, which a paged cache cannot follow"
            )
        unknown = sorted(
            key
            for key, value in arguments.items()
            if key not in _HARMLESS | _HONOURED and value is not None and value is not False
        )
        if unknown:
            raise cannot_be_paged(
                f"{name} passes {', '.join(unknown)} to its attention, which no attention "
                "backend here honours yet"
            )
        is_causal = arguments.get("is_causal")
        if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
            raise cannot_be_paged(f"{name} is not causal: only decoder attention can be paged")
        scale = arguments.get("scaling")
        self._layers[module] = AttentionLayer(
            layer_idx=int(getattr(module, "layer_idx", None) or 0),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=key.shape[3],
            head_size_v=value.shape[3],
            scale=float(query.shape[3] ** -0.5 if scale is None else scale),
            sliding_window=arguments.get("sliding_window"),
            softcap=arguments.get("softcap"),
            sinks=arguments.get("s_aux"),
        )
        module.__dict__["_paged_handle"] = layer_handle(module, self.attend)
        return _zeros(query, value)

    @property
    def observing(self) -> bool:
        """True within `observe`."""
        return self._observing


def paged_attention_of(model: nn.Module) -> PagedAttention:
    """The paged attention of a model that was made into a `PagedModel`."""
    paged: PagedAttention = model.__dict__["_paged_attention"]
    return paged


def _zeros(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, S, num_heads, head_size_v]; in the shape of what `attend` returns."""
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; the signature is theirs."""
    if torch.compiler.is_compiling():
        handle: torch.Tensor = module._paged_handle  # type: ignore[assignment]
        return paged_attention(query, key, value, handle), None
    paged: PagedAttention = module.__dict__["_paged_attention"]
    if not paged.observing:
        return paged.attend(module, query, key, value), None
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    return paged.note(module, query, key, value, arguments), None


def register_attention() -> None:
    """Make `ATTN_IMPLEMENTATION` known to transformers. Doing it again changes nothing."""
    AttentionInterface.register(ATTN_IMPLEMENTATION, _attention_function)
