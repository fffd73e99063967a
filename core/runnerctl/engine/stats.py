"""`EngineStats`: what an engine has done, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runnerctl.engine.request import Request
    from runnerctl.runner.transforms import AppliedTransform

_DERIVED = (
    "time_to_first_token_s",
    "tokens_per_second",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "cache_hit_rate",
    "mean_batch_size",
)


@dataclass(slots=True)
class EngineStats:
    """Counts since the start. Times are wall-clock seconds. An answer is one of a prompt's `n`.

    Attributes:
        num_requests: answers that ended, aborted ones included.
        num_aborted: those of them that were ended from outside, or by an error.
        num_first_tokens: answers that have a token.
        num_prompt_tokens, num_cached_tokens: of the prompts of those; the latter came
            from the prefix cache.
        num_generated_tokens: tokens of all answers.
        num_prefill_tokens: computed tokens that gave no token of an answer but its
            last one: prompts, and what preempted requests had to compute again.
        num_steps, step_time_s: engine steps, and the time spent in them. Of steps that
            overlap, each counts from the result of the one before it to its own.
        prefill_time_s: of the steps that computed any prefill tokens.
        num_decode_tokens: tokens generated in the other steps.
        num_scheduled_requests: requests in a step, summed over the steps.
        num_preemptions: how often a request lost its blocks and had to be recomputed.
        total_time_to_first_token_s: over `num_first_tokens`, from admission.
        num_blocks, num_blocks_used, peak_blocks_used: KV blocks there are, that live
            requests and steps in flight hold now, and that they held at most.
        plugin_seconds: time in each hook of each plugin; `import` is its loading.
        attention_backend: that serves the model; "" if the runner has none.
        transforms: of plugins, that changed the model, in the order of their application.
        dtype: that the model computes in, as "float32"; "" if the runner does not say.
        pooling: how a pooling model pools; "" of a model that generates. Its texts count as
            answers without tokens.
        ranks: how many there are, and where, unless it is one in this process.
        note: how the model is served, where that is not the usual way; or "".
    """

    num_requests: int = 0
    num_aborted: int = 0
    num_first_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_steps: int = 0
    step_time_s: float = 0.0
    prefill_time_s: float = 0.0
    num_scheduled_requests: int = 0
    num_preemptions: int = 0
    total_time_to_first_token_s: float = 0.0
    num_blocks: int = 0
    num_blocks_used: int = 0
    peak_blocks_used: int = 0
    plugin_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    attention_backend: str = ""
    transforms: tuple[AppliedTransform, ...] = ()
    dtype: str = ""
    pooling: str = ""
    ranks: str = ""
    note: str = ""

    def count_step(
        self, prefill_tokens: int, num_requests: int, num_generated: int, seconds: float
    ) -> None:
        """One step: what `num_prefill_tokens` counted for it, its size, its tokens, its time."""
        self.num_steps += 1
        self.step_time_s += seconds
        self.num_scheduled_requests += num_requests
        self.num_generated_tokens += num_generated
        if prefill_tokens:
            self.num_prefill_tokens += prefill_tokens
            self.prefill_time_s += seconds
        else:
            self.num_decode_tokens += num_generated

    def count_first_token(self, request: Request, seconds: float) -> None:
        """An answer got its first token, `seconds` after its admission."""
        self.num_first_tokens += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens or 0
        self.total_time_to_first_token_s += seconds

    def count_end(self, request: Request) -> None:
        """An answer ended."""
        self.num_requests += 1
        self.num_aborted += request.finish_reason in ("abort", None)

    @property
    def time_to_first_token_s(self) -> float:
        """The mean over the answers, in seconds."""
        return _ratio(self.total_time_to_first_token_s, self.num_first_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of stepping, over all requests together."""
        return _ratio(self.num_generated_tokens, self.step_time_s)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prefill tokens per second of the steps that computed any."""
        return _ratio(self.num_prefill_tokens, self.prefill_time_s)

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second of the steps that did nothing else; 0 without one."""
        return _ratio(self.num_decode_tokens, self.step_time_s - self.prefill_time_s)

    @property
    def cache_hit_rate(self) -> float:
        """The share of the prompt tokens that came from the prefix cache, 0 to 1."""
        return _ratio(self.num_cached_tokens, self.num_prompt_tokens)

    @property
    def mean_batch_size(self) -> float:
        """Requests in a step."""
        return _ratio(self.num_scheduled_requests, self.num_steps)

    def to_dict(self) -> dict[str, Any]:
        """Every count and every number derived from them, ready for JSON."""
        return asdict(self) | {name: getattr(self, name) for name in _DERIVED}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
