"""What a step leaves on the device, until the host asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from runnerctl.runner.logprobs import LogprobTensors
from runnerctl.runner.step import StepResult, TokenLogprobs

from .inputs import StepBatch
from .sampling import PromptSpan


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tensors of a step, and whose they are.

    Attributes:
        step_id: of the plan.
        batch: of the step; None if it had nothing to compute.
        tokens: [number of batch.sampling], int64.
        logprobs: of the tokens of those that asked, in the order of the batch.
        spans, prompt_logprobs: of prompt tokens, span after span.
    """

    step_id: int
    batch: StepBatch | None = None
    tokens: torch.Tensor | None = None
    logprobs: LogprobTensors | None = None
    spans: tuple[PromptSpan, ...] = ()
    prompt_logprobs: LogprobTensors | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> StepOutput:
        """The same with every tensor changed: copied to the host, say."""
        return replace(
            self,
            tokens=None if self.tokens is None else change(self.tokens),
            logprobs=self.logprobs and self.logprobs.map(change),
            prompt_logprobs=self.prompt_logprobs and self.prompt_logprobs.map(change),
        )

    def to_result(self) -> StepResult:
        """The plain values. Waits for the device if the tensors are still there."""
        if self.batch is None:
            return StepResult(self.step_id, {})
        names = [self.batch.request_ids[place] for place in self.batch.sampling]
        tokens = [] if self.tokens is None else self.tokens.tolist()
        return StepResult(
            self.step_id,
            sampled_token_ids=dict(zip(names, tokens, strict=True)),
            logprobs=self._logprobs(self.batch),
            prompt_logprobs=self._prompt_logprobs(self.batch),
        )

    def _logprobs(self, batch: StepBatch) -> dict[str, TokenLogprobs]:
        if self.logprobs is None:
            return {}
        asked = [
            (batch.request_ids[place], top)
            for place in batch.sampling
            if (top := batch.rows[place].sampling_params.logprobs) is not None
        ]
        entries = self.logprobs.to_entries([top for _, top in asked])
        return {name: entry for (name, _), entry in zip(asked, entries, strict=True)}

    def _prompt_logprobs(self, batch: StepBatch) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        if self.prompt_logprobs is None:
            return {}
        counts = [span.top for span in self.spans for _ in range(span.end - span.start)]
        entries = iter(self.prompt_logprobs.to_entries(counts))
        return {
            batch.request_ids[span.place]: (
                span.start,
                [next(entries) for _ in range(span.end - span.start)],
            )
            for span in self.spans
        }
