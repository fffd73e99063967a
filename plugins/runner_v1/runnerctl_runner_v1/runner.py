"""`ModelRunnerV1`: one step at a time, inputs built on the host with numpy."""

from __future__ import annotations

import torch

from runnerctl.runner.memory import default_device
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel, WorkerContext
from runnerctl.runner.step import FinishedStep, StepHandle, StepPlan, StepResult

from .input_batch import InputBatch, RequestState
from .inputs import prepare_inputs
from .loading import load_serving
from .sampling import prompt_logprobs, sample_tokens


class ModelRunnerV1:
    """Synchronous runner over a persistent host batch. See `runnerctl.runner.protocol`."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._config = context.config
        self._device = default_device()
        self._requests: dict[str, RequestState] = {}

    def load(self) -> LoadedModel:
        """See `ModelRunner.load`."""
        self._serving = load_serving(self._context, self._device)
        return self._serving.facts

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `ModelRunner.kv_cache_spec`."""
        return self._serving.kv_cache_spec()

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """See `ModelRunner.initialize_kv_cache`."""
        block_size, max_num_seqs = (
            self._config.cache.block_size,
            self._config.scheduler.max_num_seqs,
        )
        self._serving.allocate(num_blocks, max_num_seqs)
        self._batch = InputBatch(max_num_seqs, max_model_len, block_size)

    def warm_up(self) -> None:
        """Nothing to warm up: V1 is eager, and the dry run at load touched every layer."""

    def shutdown(self) -> None:
        """See `ModelRunner.shutdown`."""
        if hasattr(self, "_serving"):
            self._serving.close()
            del self._serving
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
        batch, block_size = self._batch, self._config.cache.block_size
        carries_chunks = self._serving.carries_chunks
        inputs = prepare_inputs(batch, plan, self._requests, block_size, carries_chunks)
        if not inputs.step.request_ids:
            return StepResult(plan.step_id, {})
        logits = self._serving.forward(inputs.step)
        for request_id, length in zip(inputs.step.request_ids, inputs.step.seq_lens, strict=True):
            self._requests[request_id].num_run_tokens = int(length)
        states = [self._requests[batch.request_ids[row]] for row in inputs.sampled_rows]
        num_prompt_rows = logits.shape[0] - len(states)
        tokens, logprobs = [], {}
        if states:
            tokens, logprobs = sample_tokens(logits[num_prompt_rows:], inputs, batch, states)
        for state, token_id in zip(states, tokens, strict=True):
            state.token_ids.append(token_id)
            batch.append_token(state.request_id, token_id)
        return StepResult(
            plan.step_id,
            sampled_token_ids={s.request_id: t for s, t in zip(states, tokens, strict=True)},
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs(logits[:num_prompt_rows], inputs.spans),
        )

    def _update_batch(self, plan: StepPlan) -> None:
        """Bring rows and states in line with the plan."""
        batch = self._batch
        for request_id in plan.finished_request_ids:
            self._requests.pop(request_id, None)
            self._serving.forget(request_id)
        for request_id in plan.preempted_request_ids:
            self._serving.forget(request_id)
        for request_id in [r for r in batch.request_ids if r not in plan.num_scheduled_tokens]:
            batch.remove(request_id)
        for new in plan.new_requests:
            if new.request_id in batch:  # a finished request's id, used again
                batch.remove(new.request_id)
            state = RequestState(
                request_id=new.request_id,
                sampling_params=new.sampling_params,
                num_prompt_tokens=new.num_prompt_tokens,
                stop_token_ids=new.stop_token_ids,
                token_ids=list(new.prefill_token_ids),
                block_ids=list(new.block_ids),
                num_computed_tokens=new.num_computed_tokens,
                num_run_tokens=new.num_computed_tokens,
            )
            self._requests[new.request_id] = state
            batch.add(state)
        for cached in plan.cached_requests:
            state = self._requests[cached.request_id]
            state.num_computed_tokens = cached.num_computed_tokens
            if cached.resumed:
                state.block_ids = []
                state.num_run_tokens = cached.num_computed_tokens
            state.block_ids += cached.new_block_ids
            if cached.request_id not in batch:
                batch.add(state)
                continue
            batch.append_blocks(cached.request_id, cached.new_block_ids)
            batch.num_computed_tokens[batch.row(cached.request_id)] = cached.num_computed_tokens
