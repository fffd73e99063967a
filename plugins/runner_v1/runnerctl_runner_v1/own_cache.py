"""For architectures that cannot be paged: each request by itself, on transformers' cache.

Inputs are prepared by the model's own methods, as `generate` does, so whatever a model keeps
of its past is kept right. Nothing is shared between requests, and a step costs as much as its
requests one after the other.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from runnerctl.errors import ModelError
from runnerctl.runner.memory import default_cache_bytes, free_memory_bytes
from runnerctl.runner.protocol import AttentionLayerSpec, KVCacheSpec, LoadedModel

from .serving import ModelStep

# Long enough for the keys and values of a token to show in the shapes.
_REHEARSAL = 4


@dataclass(slots=True)
class Past:
    """What a model's own methods hand from one forward of a request to the next."""

    arguments: dict[str, Any]
    token_ids: torch.Tensor


class OwnCacheServing:
    """See the module's docstring, and `Serving`.

    Raises:
        ModelError: not even this way can the model be run.
    """

    carries_chunks = False

    def __init__(self, model: PreTrainedModel, facts: LoadedModel) -> None:
        self.facts = facts
        self._model: PreTrainedModel | None = model
        self._device: torch.device = model.device
        self._pasts: dict[str, Past] = {}
        parameters = inspect.signature(model.forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._layers = self._rehearse()

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Serving.kv_cache_spec`; blocks are a measure of memory here, not a place."""
        free = free_memory_bytes(self._device)
        return KVCacheSpec(
            layers=self._layers,
            available_bytes=default_cache_bytes(self._device, free),
            free_bytes=free,
        )

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        """The caches grow with their requests."""

    def forward(self, step: ModelStep) -> torch.Tensor:
        """See `Serving.forward`."""
        logits: torch.Tensor | None = None
        bounds = step.query_start_loc.tolist()
        for i, request_id in enumerate(step.request_ids):
            start, end = bounds[i], bounds[i + 1]
            wanted = (step.logits_rows >= start) & (step.logits_rows < end)
            token_ids = torch.from_numpy(step.token_ids[start:end]).to(self._device)
            rows = torch.from_numpy(step.logits_rows[wanted] - start).to(self._device)
            made = self._run_request(request_id, step.num_prompt_tokens[i], token_ids, rows)
            if logits is None:
                logits = made.new_empty(len(step.logits_rows), made.shape[1])
            logits[torch.from_numpy(wanted)] = made
        assert logits is not None, "a step without requests"
        return logits

    def forget(self, request_id: str) -> None:
        """See `Serving.forget`."""
        self._pasts.pop(request_id, None)

    def close(self) -> None:
        """See `Serving.close`."""
        self._pasts.clear()
        self._model = None

    def _run_request(
        self, request_id: str, num_prompt_tokens: int, token_ids: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits of `rows` of a request's next tokens, [S]: [num_rows, vocab_size].

        One that comes back is run as it was before, its answer token by token: a model's
        past need not be the same when all of it is run at once.
        """
        pieces = [token_ids]
        if request_id not in self._pasts and len(token_ids) > num_prompt_tokens:
            pieces = list(
                token_ids.split([num_prompt_tokens] + [1] * (len(token_ids) - num_prompt_tokens))
            )
        made, first = [], 0
        for piece in pieces:
            inside = rows[(rows >= first) & (rows < first + len(piece))] - first
            made.append(self._run(request_id, piece.unsqueeze(0), inside))
            first += len(piece)
        return torch.cat(made)

    def _run(self, request_id: str, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits of `rows` of a request's next tokens, [1, S]: [num_rows, vocab_size]."""
        model = self._model
        assert model is not None
        past = self._pasts.get(request_id)
        count = token_ids.shape[1]
        if past is None:
            past = Past(self._first_arguments(count), token_ids)
            inputs = model.prepare_inputs_for_generation(
                token_ids, is_first_iteration=True, **past.arguments
            )
        else:
            past.token_ids = torch.cat([past.token_ids, token_ids], dim=1)
            inputs = model.prepare_inputs_for_generation(
                past.token_ids, next_sequence_length=count, **past.arguments
            )
        first = 0
        if self._takes_logits_to_keep:
            first = int(rows.min()) if len(rows) else count - 1
            inputs["logits_to_keep"] = count - first
        output = model(**inputs, return_dict=True)
        past.arguments = model._update_model_kwargs_for_generation(output, past.arguments)
        self._pasts[request_id] = past
        logits: torch.Tensor = output.logits[0]
        return logits[rows - first]

    def _first_arguments(self, count: int) -> dict[str, Any]:
        model = self._model
        assert model is not None
        arguments: dict[str, Any] = {
            "use_cache": True,
            "attention_mask": torch.ones(1, count, dtype=torch.int64, device=self._device),
        }
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(count, device=self._device).unsqueeze(0)
        if model._supports_default_dynamic_cache():
            config = model.config.get_text_config(decoder=True)
            arguments[self._cache_name] = DynamicCache(config=config)
        return arguments

    @torch.inference_mode()
    def _rehearse(self) -> tuple[AttentionLayerSpec, ...]:
        """Run two requests, in turns and alone; returns what each layer keeps per token.

        As far as it shows: a cache of the model's own is not counted.
        """
        rows = torch.zeros(1, dtype=torch.int64, device=self._device)
        tokens = torch.arange(2 * _REHEARSAL, device=self._device).view(2, 1, -1)

        def run(name: str, token_ids: torch.Tensor) -> torch.Tensor:
            return self._run(name, token_ids, rows)

        try:
            run("alone", tokens[0])
            alone = run("alone", tokens[1, :, :1])
            run("first", tokens[0])
            run("second", tokens[1])
            in_turns = run("first", tokens[1, :, :1])
        except Exception as error:
            raise self._refusal(f"{type(error).__name__}: {error}") from error
        if not torch.allclose(alone, in_turns, rtol=1e-2, atol=1e-3):
            raise self._refusal("it keeps the past of a request in the model itself")
        cache = self._pasts["alone"].arguments.get(self._cache_name)
        self._pasts.clear()
        return tuple(
            AttentionLayerSpec(
                layer_idx=index,
                num_kv_heads=keys.shape[1],
                head_size=keys.shape[3],
                head_size_v=layer.values.shape[3],
                dtype_bytes=keys.itemsize,
            )
            for index, layer in enumerate(getattr(cache, "layers", ()))
            if (keys := getattr(layer, "keys", None)) is not None and keys.dim() == 4
        )

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"{type(self._model).__name__} cannot serve several requests, each on a cache of "
            f"its own ({why})",
            remedy="this architecture cannot be served; take another model",
        )
