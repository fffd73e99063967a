"""A transformers model with recurrent layers, in steps of many requests.

Tokens of several requests cannot be packed into one row here: a recurrent layer would carry
state from one request into the next. Requests that decode go together, one row each; every
other request has a forward of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from runnerctl.runner.attention.interface import cannot_be_paged
from runnerctl.runner.paged_model import PagedModel, check_layers, refusing
from runnerctl.runner.recurrent_state import LayerPlan, StatePool, layer_plans, state_bytes

# How transformers' models call the argument for their cache, newest name first.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """True if a layer keeps state of a fixed size, as transformers' own cache would.

    Raises:
        CannotBePagedError: a layer keeps something else than state or keys and values.
    """
    return any(
        plan.is_recurrent for plan in layer_plans(model.config.get_text_config(decoder=True))
    )


class RecurrentModel(PagedModel):
    """A loaded model with recurrent layers, checked and ready.

    Raises:
        CannotBePagedError: the architecture cannot be served this way; says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._plans: list[LayerPlan] = layer_plans(model.config.get_text_config(decoder=True))
        super().__init__(model)

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's recurrent state over all layers."""
        return state_bytes(self._plans, self._example)

    @contextmanager
    def on_own_cache(self) -> Iterator[PreTrainedModel]:
        """transformers' model, which within this attends to what its own cache holds.

        A way to the right answer of one request that shares neither state pool nor paged
        cache with `forward_rows`.
        """
        with self._attention.unpaged():
            yield self._model

    def new_pool(self, num_slots: int) -> StatePool:
        """Room for the recurrent state of so many requests."""
        return StatePool(self._plans, self._example, num_slots)

    def forward_rows(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        cache: Cache,
        paged: tuple[Any, torch.Tensor] | None,
    ) -> torch.Tensor:
        """One forward: of one request's tokens, or of one token of each of several requests.

        Args:
            tokens: input_ids and positions, both [B, S], int64; B or S is 1.
            rows: [num_rows], int64; the tokens whose logits are wanted, counted row after row.
            cache: with the state of these B requests, changed in place.
            paged: metadata of the backend and slot_mapping [B * S], as in `PagedModel.forward`;
                None without attention layers.

        Returns:
            [num_rows, vocab_size].
        """
        if paged is None:
            return self._rows(tokens, rows, cache)
        with self._attention.step(*paged):
            return self._rows(tokens, rows, cache)

    def _rows(
        self, tokens: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        input_ids, positions = tokens
        arguments: dict[str, Any] = {"use_cache": True, self._cache_name: cache}
        if self._takes_positions:
            arguments["position_ids"] = positions
        # Of one row only: the model keeps the same tokens of every row.
        keep = self._takes_logits_to_keep and input_ids.shape[0] == 1
        if keep:
            arguments["logits_to_keep"] = rows
        logits: torch.Tensor = self._model(input_ids=input_ids, **arguments).logits
        return logits[0] if keep else logits.flatten(0, 1)[rows]

    def _check_signature(self) -> bool:
        parameters = inspect.signature(self._model.forward).parameters
        names = [name for name in _CACHE_NAMES if name in parameters]
        if not names:
            raise cannot_be_paged(f"{self._architecture} takes no cache for its recurrent state")
        self._cache_name = names[0]
        self._takes_positions = "position_ids" in parameters
        return "logits_to_keep" in parameters

    @torch.inference_mode()
    def _dry_run(self) -> None:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device).unsqueeze(0)
        self._example = Cache(layers=[plan.make() for plan in self._plans])
        with self._attention.observe(), refusing(self._architecture):
            self._rows((tokens, positions), tokens[0, :1], self._example)
        attending = [i for i, plan in enumerate(self._plans) if plan.is_attention]
        check_layers(self._architecture, self._config, self.layers, attending)
        if not self.state_bytes:
            raise cannot_be_paged(
                f"{self._architecture} keeps its recurrent state somewhere else than in "
                "transformers' cache"
            )
