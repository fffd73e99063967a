"""The rounds of `runnerctl bench`, and what is counted and timed in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runnerctl.cli.bench_work import Workload
from runnerctl.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM

Asked = Sequence[tuple[Any, SamplingParams]]


@dataclass(slots=True)
class Round:
    """One pass over all prompts. Times are wall-clock seconds.

    Attributes:
        seconds: for all of it.
        prompt_tokens, cached_tokens: of the prompts; the latter came from the prefix cache.
        prefill_tokens, prefill_s: computed, and the time of the steps that did, as in `--stats`.
        generated_tokens: of all answers.
        time_to_first_token_s, latency_s: of each answer, from when it was asked for.
        time_per_output_token_s: of each answer of two tokens or more: the mean time from
            one token to the next.
    """

    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    generated_tokens: int = 0
    time_to_first_token_s: list[float] = field(default_factory=list)
    time_per_output_token_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the round."""
        return self.generated_tokens / self.seconds

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Over the steps that computed a prompt; None if none did."""
        return self.prefill_tokens / self.prefill_s if self.prefill_tokens else None


def run_round(llm: LLM, asked: Asked, *, one_by_one: bool) -> Round:
    """Answer every prompt once."""
    done = Round()
    before = llm.stats()
    started = time.perf_counter()
    for part in [[one] for one in asked] if one_by_one else [asked]:
        _answer(llm, part, done)
    done.seconds = time.perf_counter() - started
    after = llm.stats()
    done.prompt_tokens = after.num_prompt_tokens - before.num_prompt_tokens
    done.cached_tokens = after.num_cached_tokens - before.num_cached_tokens
    done.prefill_tokens = after.num_prefill_tokens - before.num_prefill_tokens
    done.prefill_s = after.prefill_time_s - before.prefill_time_s
    return done


def _answer(llm: LLM, asked: Asked, done: Round) -> None:
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    counts: dict[str, int] = {}
    started = time.perf_counter()
    for delta in llm.stream([prompt for prompt, _ in asked], [params for _, params in asked]):
        if delta.token_ids:
            now = time.perf_counter()
            first.setdefault(delta.request_id, now)
            last[delta.request_id] = now
            counts[delta.request_id] = counts.get(delta.request_id, 0) + len(delta.token_ids)
    for name, count in counts.items():
        done.generated_tokens += count
        done.time_to_first_token_s.append(first[name] - started)
        done.latency_s.append(last[name] - started)
        if count > 1:
            done.time_per_output_token_s.append((last[name] - first[name]) / (count - 1))


def run_rounds(
    llm: LLM,
    asked: Asked,
    work: Workload,
    *,
    repeats: int,
    warmup: int,
    say: Callable[[str], None],
) -> list[Round]:
    """`warmup` rounds that do not count, then `repeats` that do."""
    kept = []
    for index in range(-warmup, repeats):
        done = run_round(llm, asked, one_by_one=work.one_by_one)
        rate = done.tokens_per_second
        what = "generated"
        if work.mode == "prefill" and done.prefill_tokens_per_second:
            rate, what = done.prefill_tokens_per_second, "prefill"
        name = f"round {index + 1} of {repeats}"
        if index < 0:
            name = f"warm-up {index + warmup + 1} of {warmup}"
        say(f"{name}: {done.seconds:.2f} s, {rate:.1f} {what} tokens/s")
        if index >= 0:
            kept.append(done)
    return kept


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, least and greatest of the rounds; None without values."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles over answers; None without values. Each percentile is one of them."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"mean": statistics.fmean(ordered)}
    for percent in (50, 90, 99):
        # nearest rank: the least value that so many percent do not exceed
        found[f"p{percent}"] = ordered[-(-percent * len(ordered) // 100) - 1]
    return found
