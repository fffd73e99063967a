"""A transformers model whose attention is ours: packed tokens in, logits out.

A dry run after loading counts one attention call per layer. An architecture whose
layers go around the interface would otherwise run without a cache and be silently
wrong; it is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from runnerctl.errors import UserError
from runnerctl.runner.attention.base import AttentionBackend, AttentionLayer, LayerKVCache
from runnerctl.runner.attention.interface import (
    PagedAttention,
    cannot_be_paged,
    paged_attention_of,
)
from runnerctl.runner.batch_transform import BatchShare
from runnerctl.runner.protocol import AttentionLayerSpec

# As transformers' configs call the types of layers; the second of each have state as well.
_FULL = frozenset({"full_attention", "hybrid"})
_WINDOWED = frozenset({"sliding_attention", "hybrid_sliding"})


class PagedModel:
    """A loaded model, checked and ready for packed steps.

    Raises:
        CannotBePagedError: the architecture cannot be served on a paged cache; says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self._architecture = type(model).__name__
        self._takes_logits_to_keep = self._check_signature()
        self._attention = PagedAttention(model)
        self._dry_run()

    @property
    def architecture(self) -> str:
        """Name of the model's class."""
        return self._architecture

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self._model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and cache."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def layers(self) -> list[AttentionLayer]:
        """The attention layers in order of execution."""
        return self._attention.layers

    @property
    def max_model_len(self) -> int | None:
        """The context length in tokens, or None if the config sets no bound."""
        return context_length(self._config)

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        return int(self._config.vocab_size)

    def layer_specs(self) -> tuple[AttentionLayerSpec, ...]:
        """What the cache must hold, layer by layer."""
        return tuple(
            AttentionLayerSpec(
                layer_idx=layer.layer_idx,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                head_size_v=layer.head_size_v,
                dtype_bytes=self.dtype.itemsize,
            )
            for layer in self.layers
        )

    def allocate_cache(
        self, backend: AttentionBackend[Any], num_blocks: int, block_size: int
    ) -> None:
        """Allocate the paged cache of every layer and bind it."""
        allocate = torch.zeros if backend.needs_finite_cache else torch.empty
        caches = []
        for layer in self.layers:
            shape = (num_blocks, block_size, layer.num_kv_heads)
            key = allocate(*shape, layer.head_size, dtype=self.dtype, device=self.device)
            value = allocate(*shape, layer.head_size_v, dtype=self.dtype, device=self.device)
            caches.append(LayerKVCache(key, value))
        self._attention.bind(backend, caches)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        metadata: Any,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """One step over the packed tokens of all requests.

        Args:
            input_ids, positions: [num_tokens], int64.
            rows: [num_rows], int64; the tokens whose logits are wanted.
            metadata: from the backend's `prepare`.
            slot_mapping: [num_tokens], int64.

        Returns:
            [num_rows, vocab_size].
        """
        with self._attention.step(metadata, slot_mapping):
            return self._run(input_ids, positions, rows)

    def forward_share(
        self,
        share: BatchShare,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        metadata: Any,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """As `forward`, on a rank that runs some of the tokens only.

        Args:
            share: of this rank.
            input_ids, positions, rows, slot_mapping: of the whole step, as for `forward`.
            metadata: from the backend's `prepare` for the share.

        Returns:
            [num_rows, vocab_size]; the same on every rank.
        """
        mine = share.token_rows
        with (
            self._attention.step(metadata, slot_mapping, share.exchange_kv),
            self._restoring(lambda hidden: share.restore(hidden, rows)),
        ):
            return _packed_forward(
                self._model, input_ids.index_select(0, mine), positions.index_select(0, mine)
            )

    def close(self) -> None:
        """Let go of the cache and, where layers are compiled, of what was compiled."""
        self._attention.close()
        for module in self._model.modules():
            # A compiled call refers to its module: a cycle, as in the attention's case.
            module._compiled_call_impl = None

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        keep = {"logits_to_keep": rows} if self._takes_logits_to_keep else {}
        logits = _packed_forward(self._model, input_ids, positions, **keep)
        return logits if self._takes_logits_to_keep else logits[rows]

    @contextmanager
    def _restoring(self, restore: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Within this, the head is given what `restore` makes of the last hidden states."""

        def swap(module: nn.Module, arguments: Any, output: Any) -> None:
            output.last_hidden_state = restore(output.last_hidden_state[0]).unsqueeze(0)

        hook = self._model.base_model.register_forward_hook(swap)
        try:
            yield
        finally:
            hook.remove()

    def _check_signature(self) -> bool:
        """Whether the head can be run on some tokens only."""
        parameters = inspect.signature(self._model.forward).parameters
        if "position_ids" not in parameters:
            raise cannot_be_paged(
                f"{self._architecture} takes no position_ids, so its positions cannot be told "
                "apart in a packed batch",
            )
        return "logits_to_keep" in parameters

    @torch.inference_mode()
    def _dry_run(self) -> None:
        tokens = torch.zeros(2, dtype=torch.int64, device=self.device)
        with self._attention.observe(), refusing(self._architecture):
            self._run(tokens, torch.arange(2, device=self.device), tokens[:1])
        check_layers(self._architecture, self._config, self.layers)


@contextmanager
def refusing(architecture: str) -> Iterator[None]:
    """Within this, whatever an architecture's own code raises is a reason not to page it.

    Raises:
        CannotBePagedError: with that reason.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise cannot_be_paged(
            f"{architecture} does not run on packed tokens ({type(error).__name__}: {error})"
        ) from error


@torch.inference_mode()
def rehearse(model: PreTrainedModel, num_tokens: int) -> None:
    """Run a step of so many tokens with attention left out; no cache is needed.

    For transformations that compile or measure. The model must have been made into a
    `PagedModel`.
    """
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
    with paged_attention_of(model).rehearse():
        _packed_forward(model, tokens, torch.arange(num_tokens, device=model.device))


def _packed_forward(
    model: PreTrainedModel, input_ids: torch.Tensor, positions: torch.Tensor, **keep: Any
) -> torch.Tensor:
    """Logits of packed tokens; tokens and positions are [num_tokens], int64."""
    output = model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        **keep,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def context_length(config: PretrainedConfig) -> int | None:
    """In tokens, or None if the config sets no bound."""
    length = getattr(config, "max_position_embeddings", None)
    return length if length and length > 0 else None


def check_layers(
    architecture: str,
    config: PretrainedConfig,
    layers: Sequence[AttentionLayer],
    attending: Sequence[int] | None = None,
) -> None:
    """Compare what the dry run saw with what the config promises.

    Args:
        architecture: for messages.
        config: of the text model.
        layers: that ran through the attention interface.
        attending: which of the model's layers have attention. Default: all.

    Raises:
        CannotBePagedError: a layer went around the interface, or its window was not passed on.
    """
    if attending is None:
        attending = range(int(config.num_hidden_layers))
    if len(layers) != len(attending):
        raise cannot_be_paged(
            f"{architecture} ran {len(layers)} of its {len(attending)} layers through the "
            "attention interface; the others bypass the paged KV cache, so its answers would be "
            "wrong",
        )
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        kinds = [layer_types[index] for index in attending]
        unknown = sorted(set(kinds) - _FULL - _WINDOWED)
        if unknown:
            raise cannot_be_paged(
                f"{architecture} has layers of type {', '.join(unknown)}; only full and sliding "
                "attention can be paged"
            )
        windowed = [kind in _WINDOWED for kind in kinds]
    else:
        # without a list, a window in the config is meant for every layer or for none
        windowed = [False] * len(attending)
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            windowed = [True] * len(attending)
    pairs = zip(layers, windowed, strict=True)
    silent = [x.layer_idx for x, has_window in pairs if has_window and not x.sliding_window]
    if silent:
        raise cannot_be_paged(
            f"{architecture} has a sliding window in layers {silent} but does not pass it to its "
            "attention, so its answers would be wrong beyond the window",
        )
