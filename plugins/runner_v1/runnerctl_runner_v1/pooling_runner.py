"""`PoolingRunnerV1`: whole texts in, one vector or score list each out. No cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from runnerctl.engine.pooling_params import PoolingParams
from runnerctl.runner.memory import default_device, free_memory_bytes
from runnerctl.runner.pooling_loader import load_pooling_model
from runnerctl.runner.pooling_model import Together
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel, WorkerContext
from runnerctl.runner.step import FinishedStep, NewRequest, StepHandle, StepPlan, StepResult

logger = logging.getLogger(__name__)

# Of what a padded forward computes, the share that may be padding.
MAX_PADDING = 0.2


class PoolingRunnerV1:
    """Reads the texts of a step in groups of similar length. See `runnerctl.runner.protocol`."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._device = default_device()

    def load(self) -> LoadedModel:
        """See `ModelRunner.load`."""
        self._loaded = load_pooling_model(self._context, self._device)
        pooling = self._loaded.facts.pooling
        assert pooling is not None
        logger.info("%s: %s", pooling.task, pooling.method)
        return self._loaded.facts

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `ModelRunner.kv_cache_spec`: there is no layer to cache."""
        free = free_memory_bytes(self._device)
        return KVCacheSpec(layers=(), available_bytes=free, free_bytes=free)

    def initialize_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Nothing to allocate."""

    def warm_up(self) -> None:
        """Nothing to warm up: the model was tried at load."""

    def shutdown(self) -> None:
        """See `ModelRunner.shutdown`."""
        if hasattr(self, "_loaded"):
            del self._loaded

    def execute(self, plan: StepPlan) -> StepHandle:
        """See `ModelRunner.execute`; the step is done when this returns."""
        try:
            return FinishedStep(self._step(plan))
        except Exception as error:  # the engine gets it from the handle, like any runner's
            return FinishedStep(error)

    def _step(self, plan: StepPlan) -> StepResult:
        requests = plan.new_requests
        for request in requests:
            scheduled = plan.num_scheduled_tokens[request.request_id]
            if scheduled != len(request.prefill_token_ids):
                raise RuntimeError(f"request {request.request_id!r} is not scheduled whole")
        lengths = [len(request.prefill_token_ids) for request in requests]
        pooled: dict[str, list[float]] = {}
        for group in groups(lengths, self._loaded.model.together):
            pooled |= self._run([requests[i] for i in group])
        return StepResult(plan.step_id, {}, pooled=pooled)

    def _run(self, requests: Sequence[NewRequest]) -> dict[str, list[float]]:
        """One forward."""
        texts = [request.prefill_token_ids for request in requests]
        types = None
        if any(request.token_type_ids for request in requests):
            types = [r.token_type_ids or (0,) * len(r.prefill_token_ids) for r in requests]
        output, lengths = self._loaded.model.forward(texts, types)
        by_params: dict[PoolingParams, list[int]] = {}
        for row, request in enumerate(requests):
            by_params.setdefault(request.pooling_params or PoolingParams(), []).append(row)
        pooled = {}
        for params, rows in by_params.items():
            part = torch.tensor(rows, device=output.device)
            vectors = self._finish(output[part], lengths[part], params).tolist()
            pooled |= {requests[row].request_id: v for row, v in zip(rows, vectors, strict=True)}
        return pooled

    @torch.inference_mode()
    def _finish(
        self, output: torch.Tensor, lengths: torch.Tensor, params: PoolingParams
    ) -> torch.Tensor:
        """Embeddings or label numbers, float32."""
        if self._loaded.pooler is not None:
            return self._loaded.pooler.embed(output, lengths, params)
        scores = output.float()
        if params.activation and self._loaded.activation == "softmax":
            return scores.softmax(dim=-1)
        if params.activation and self._loaded.activation == "sigmoid":
            return scores.sigmoid()
        return scores


def groups(lengths: Sequence[int], together: Together) -> list[list[int]]:
    """Which texts share a forward: neighbours in length, so that little is padded.

    Args:
        lengths: in tokens.
        together: what the model allows.

    Returns:
        Indices into `lengths`; each is in one group.
    """
    made: list[list[int]] = []
    tokens = 0  # of the texts in the last group
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if made and together != "alone":
            longest = lengths[made[-1][0]]
            area = longest * (len(made[-1]) + 1)
            wasted = area - tokens - lengths[i]
            fits = lengths[i] == longest or (together == "padded" and wasted <= MAX_PADDING * area)
            if fits:
                made[-1].append(i)
                tokens += lengths[i]
                continue
        made.append([i])
        tokens = lengths[i]
    return made
