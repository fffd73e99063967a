"""`EngineStats`: what an engine has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runnerctl.engine.live_request import LiveRequest


@dataclass(slots=True)
class EngineStats:
    """Counts since the start. Times are wall-clock seconds.

    Attributes:
        num_requests: requests that ended.
        num_prompt_tokens, num_generated_tokens: of those requests.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        num_steps, step_time_s: engine steps, and the time spent in them.
        num_preemptions: how often a request lost its blocks and had to be recomputed.
        total_time_to_first_token_s: over all requests, from admission.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_steps: int = 0
    step_time_s: float = 0.0
    num_preemptions: int = 0
    total_time_to_first_token_s: float = 0.0

    def count_step(self, seconds: float) -> None:
        """One engine step, and how long it took."""
        self.num_steps += 1
        self.step_time_s += seconds

    def count_request(self, entry: LiveRequest) -> None:
        """A request that ended by itself."""
        request = entry.request
        self.num_requests += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_generated_tokens += len(request.output_token_ids)
        self.num_cached_tokens += request.num_cached_tokens or 0
        self.total_time_to_first_token_s += entry.time_to_first_token_s

    @property
    def time_to_first_token_s(self) -> float:
        """The mean over the requests, in seconds."""
        return self.total_time_to_first_token_s / max(1, self.num_requests)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of stepping, over all requests together."""
        return self.num_generated_tokens / self.step_time_s if self.step_time_s else 0.0
