"""`ModelRunnerV2`: request state on the device, two steps in flight, decode compiled."""

from __future__ import annotations

import numpy as np
import torch

from runnerctl.runner.batch_transform import make_batch_transform
from runnerctl.runner.memory import default_device
from runnerctl.runner.paged_loading import load_paged_model
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel, WorkerContext
from runnerctl.runner.step import StepHandle, StepPlan
from runnerctl.runner.transfer import to_device

from .decode_graphs import DecodeGraphs
from .inputs import StepBatch, StepInputs, prepare, prepare_decode
from .lanes import make_lane
from .sampling import logits_rows, prompt_logprobs, prompt_spans, sample_tokens
from .state_table import StateTable
from .step_output import StepOutput
from .warm_up import warm_up_plans


class ModelRunnerV2:
    """Asynchronous runner over a state table on the device. See `runnerctl.runner.protocol`."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._config = context.config
        self._device = default_device()
        self._lane = make_lane(self._device)
        self._graphs: DecodeGraphs | None = None

    def load(self) -> LoadedModel:
        """See `ModelRunner.load`."""
        return self._lane.call(self._load)

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `ModelRunner.kv_cache_spec`."""
        return self._loaded.kv_cache_spec()

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """See `ModelRunner.initialize_kv_cache`. One block more is allocated, for padding."""
        scheduler, block_size = self._config.scheduler, self._config.cache.block_size
        self._num_blocks, self._max_model_len = num_blocks, max_model_len

        def allocate() -> None:
            self._table = StateTable(
                scheduler.max_num_seqs, max_model_len, block_size, num_blocks, self._device
            )
            self._model.allocate_cache(self._backend, num_blocks + 1, block_size)

        self._lane.call(allocate)

    def warm_up(self) -> None:
        """Run prefill and decode as real steps do, on the scratch block; capture graphs."""
        limits = self._config.scheduler
        plans = warm_up_plans(limits, self._max_model_len, self._table.block_size, self._num_blocks)
        for plan in plans:
            self.execute(plan).result()
        eager = self._config.runner.enforce_eager or not self._backend.capturable
        if self._device.type == "cuda" and not eager:
            self._graphs = self._lane.call(self._capture)

    def execute(self, plan: StepPlan) -> StepHandle:
        """See `ModelRunner.execute`; the step may still run when this returns."""
        return self._lane.launch(lambda: self._step(plan))

    def shutdown(self) -> None:
        """See `ModelRunner.shutdown`."""
        self._lane.close()
        self._graphs = None
        if hasattr(self, "_table"):
            self._table.clear()
        if hasattr(self, "_model"):
            self._model.close()
            del self._model, self._loaded

    def _load(self) -> LoadedModel:
        eager = self._config.runner.enforce_eager
        self._loaded = load_paged_model(self._context, self._device, allow_compiled=not eager)
        self._model, self._backend = self._loaded.model, self._loaded.backend
        self._transform = make_batch_transform(self._context)
        return self._loaded.facts

    @torch.inference_mode()
    def _capture(self) -> DecodeGraphs:
        limit = self._config.scheduler.max_num_seqs
        return DecodeGraphs(self._capturable_decode, limit, self._table.padding_row, self._device)

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepOutput:
        table = self._table
        table.update(plan)
        if not plan.num_scheduled_tokens:
            return StepOutput(plan.step_id)
        batch = StepBatch.of(plan, table)
        spans = prompt_spans(batch)
        if batch.is_decode and not spans:
            logits, idx_mapping = self._decode(batch)
            num_scheduled, sampling = table.ones[: len(batch.rows)], idx_mapping
        else:
            inputs = prepare(table, batch)
            logits = self._forward(inputs, logits_rows(batch, spans, self._device))
            idx_mapping, num_scheduled = inputs.idx_mapping, inputs.num_scheduled
            sampling = idx_mapping[to_device(batch.sampling, torch.int64, self._device)]
        batch.advance(table, idx_mapping, num_scheduled)
        num_prompt_rows = sum(span.end - span.start for span in spans)
        tokens, logprobs = None, None
        if batch.sampling:
            tokens, logprobs = sample_tokens(
                logits[num_prompt_rows:],
                table,
                [batch.rows[place] for place in batch.sampling],
                sampling,
                table.num_computed_tokens.index_select(0, sampling).long(),
            )
        return StepOutput(
            plan.step_id,
            batch,
            tokens,
            logprobs,
            tuple(spans),
            prompt_logprobs(logits[:num_prompt_rows], table, batch, spans),
        )

    def _decode(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [num_reqs, vocab_size] of a step of one token each, and the rows it took."""
        indices = [row.index for row in batch.rows]
        if self._graphs is not None:
            return self._graphs.replay(indices)
        idx_mapping = to_device(indices, torch.int64, self._device)
        seq_lens_np = np.array(batch.num_computed, np.int32) + 1
        return self._decode_forward(idx_mapping, seq_lens_np), idx_mapping

    def _capturable_decode(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        """A decode step for any lengths, so that a graph of it serves every step."""
        longest = np.full(idx_mapping.shape[0], self._max_model_len, np.int32)
        return self._decode_forward(idx_mapping, longest)

    def _decode_forward(self, idx_mapping: torch.Tensor, seq_lens_np: np.ndarray) -> torch.Tensor:
        inputs = prepare_decode(self._table, idx_mapping, seq_lens_np)
        return self._forward(inputs, self._table.arange[: idx_mapping.shape[0]])

    def _forward(self, inputs: StepInputs, rows: torch.Tensor) -> torch.Tensor:
        share = self._transform.split(inputs.attention) if self._transform else None
        if share is not None:
            return self._model.forward_share(
                share,
                inputs.input_ids,
                inputs.positions,
                rows,
                self._backend.prepare(share.attention),
                inputs.attention.slot_mapping,
            )
        return self._model.forward(
            inputs.input_ids,
            inputs.positions,
            rows,
            self._backend.prepare(inputs.attention),
            inputs.attention.slot_mapping,
        )
