"""`ModelRunnerV1`: one step at a time, inputs built on the host with numpy."""

from __future__ import annotations

import numpy as np
import torch

from runnerctl.models.checkpoint import read_config
from runnerctl.runner.attention.base import AttentionBatch
from runnerctl.runner.attention.interface import ATTN_IMPLEMENTATION, register_attention
from runnerctl.runner.attention.registry import choose_backend
from runnerctl.runner.memory import available_cache_bytes, default_device
from runnerctl.runner.model_loader import load_model, resolve_dtype
from runnerctl.runner.paged_model import PagedModel
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel, WorkerContext
from runnerctl.runner.sampler import SamplingBatch, sample
from runnerctl.runner.step import FinishedStep, StepHandle, StepPlan, StepResult

from .input_batch import InputBatch, RequestState


class ModelRunnerV1:
    """Synchronous runner over a persistent host batch. See `runnerctl.runner.protocol`."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._config = context.config
        self._device = default_device()
        self._requests: dict[str, RequestState] = {}

    def load(self) -> LoadedModel:
        """See `ModelRunner.load`."""
        register_attention()
        config = self._config.model
        dtype = resolve_dtype(config.dtype, read_config(self._context.model_path), self._device)
        model = load_model(
            self._context.model_path,
            dtype=dtype,
            device=self._device,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=ATTN_IMPLEMENTATION,
        )
        self._model = PagedModel(model)
        backend = choose_backend(
            self._config.runner.attention_backend,
            self._model.layers,
            self._device,
            dtype,
            setting=self._config.where("attention_backend"),
        )
        self._backend = backend(self._config.cache.block_size)
        return LoadedModel(self._model.vocab_size, self._model.max_model_len)

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `ModelRunner.kv_cache_spec`."""
        return KVCacheSpec(
            layers=self._model.layer_specs(),
            available_bytes=available_cache_bytes(self._device),
        )

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """See `ModelRunner.initialize_kv_cache`."""
        block_size = self._config.cache.block_size
        self._model.allocate_cache(self._backend, num_blocks, block_size)
        self._batch = InputBatch(self._config.scheduler.max_num_seqs, max_model_len, block_size)

    def warm_up(self) -> None:
        """Nothing to warm up: V1 is eager, and the dry run at load touched every layer."""

    def shutdown(self) -> None:
        """See `ModelRunner.shutdown`."""
        if hasattr(self, "_model"):
            self._model.close()
            del self._model
        self._requests.clear()

    def execute(self, plan: StepPlan) -> StepHandle:
        """See `ModelRunner.execute`; the step is done when this returns."""
        try:
            return FinishedStep(self._step(plan))
        except Exception as error:  # the engine gets it from the handle, like any runner's
            return FinishedStep(error)

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        self._update_batch(plan)
        if not plan.num_scheduled_tokens:
            return StepResult(plan.step_id, {})
        batch = self._batch
        n = batch.num_rows
        scheduled = np.array([plan.num_scheduled_tokens[r] for r in batch.request_ids], np.int32)
        computed = batch.num_computed_tokens[:n]
        query_start_loc = np.zeros(n + 1, np.int32)
        np.cumsum(scheduled, out=query_start_loc[1:])
        row_of_token = np.repeat(np.arange(n), scheduled)
        offsets = np.arange(query_start_loc[-1]) - query_start_loc[row_of_token]
        positions = computed[row_of_token] + offsets
        input_ids = batch.token_ids[row_of_token, positions]
        block_size = self._config.cache.block_size
        blocks = batch.block_table[row_of_token, positions // block_size]
        slot_mapping = torch.from_numpy(blocks * block_size + positions % block_size)
        attention = AttentionBatch(
            query_start_loc_np=query_start_loc,
            seq_lens_np=computed + scheduled,
            block_table=torch.from_numpy(batch.block_table[:n]).to(self._device),
            slot_mapping=slot_mapping.to(self._device),
        )
        # Only a request whose known tokens are all computed after this step gets a new one.
        rows = np.flatnonzero(computed + scheduled == batch.num_tokens[:n])
        logits = self._model.forward(
            torch.from_numpy(input_ids.astype(np.int64)).to(self._device),
            torch.from_numpy(positions).to(self._device),
            torch.from_numpy(query_start_loc[1:][rows].astype(np.int64) - 1).to(self._device),
            self._backend.prepare(attention),
            attention.slot_mapping,
        )
        return StepResult(plan.step_id, self._sample(logits, rows))

    def _update_batch(self, plan: StepPlan) -> None:
        """Bring rows and states in line with the plan."""
        batch = self._batch
        for request_id in plan.finished_request_ids:
            self._requests.pop(request_id, None)
        for request_id in [r for r in batch.request_ids if r not in plan.num_scheduled_tokens]:
            batch.remove(request_id)
        for new in plan.new_requests:
            if new.request_id in batch:  # a finished request's id, used again
                batch.remove(new.request_id)
            state = RequestState(
                request_id=new.request_id,
                sampling_params=new.sampling_params,
                token_ids=list(new.prefill_token_ids),
                block_ids=list(new.block_ids),
                num_computed_tokens=new.num_computed_tokens,
            )
            self._requests[new.request_id] = state
            batch.add(state)
        for cached in plan.cached_requests:
            state = self._requests[cached.request_id]
            state.num_computed_tokens = cached.num_computed_tokens
            if cached.resumed:
                state.block_ids = []
            state.block_ids += cached.new_block_ids
            if cached.request_id not in batch:
                batch.add(state)
                continue
            batch.append_blocks(cached.request_id, cached.new_block_ids)
            batch.num_computed_tokens[batch.row(cached.request_id)] = cached.num_computed_tokens

    def _sample(self, logits: torch.Tensor, rows: np.ndarray) -> dict[str, int]:  # type: ignore[type-arg]
        """Sample for the given batch rows and remember the tokens."""
        if not len(rows):
            return {}
        batch = self._batch
        parameters = SamplingBatch(
            temperature=torch.from_numpy(batch.temperature[rows]),
            top_k=torch.from_numpy(batch.top_k[rows]),
            top_p=torch.from_numpy(batch.top_p[rows]),
            seeds=torch.from_numpy(batch.seed[rows]),
            positions=torch.from_numpy(batch.num_tokens[rows].astype(np.int64)),
        )
        tokens = sample(logits, parameters.to(self._device)).tolist()
        sampled = dict(zip([batch.request_ids[row] for row in rows], tokens, strict=True))
        for request_id, token_id in sampled.items():
            self._requests[request_id].token_ids.append(token_id)
            batch.append_token(request_id, token_id)
        return sampled
