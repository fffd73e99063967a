"""What `--stats` prints: an engine's numbers, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table

from runnerctl.engine.stats import EngineStats


def stats_report(stats: EngineStats) -> RenderableType:
    """A table of what an engine has done; the same numbers as `EngineStats.to_dict`."""
    table = Table.grid(padding=(0, 2))
    for row in _rows(stats):
        table.add_row(*row)
    return table


def _rows(s: EngineStats) -> Iterator[tuple[str, str]]:
    yield from _texts(s) if s.pooling else _answers(s)
    if s.dtype:
        yield "dtype", s.dtype
    if s.attention_backend:
        yield "attention", s.attention_backend
    if s.ranks:
        yield "ranks", s.ranks
    if s.note:
        yield "note", s.note
    heading = "transforms"
    for done in s.transforms:
        yield heading, f"{done.stage} {done.name} ({done.plugin}): {done.report}"
        heading = ""
    heading = "plugins"
    for plugin, hooks in s.plugin_seconds.items():
        yield heading, f"{plugin} {_hooks(hooks)}"
        heading = ""


def _answers(s: EngineStats) -> Iterator[tuple[str, str]]:
    yield "prompt", f"{_count(s.num_prompt_tokens, 'token')}, {s.num_cached_tokens} from the cache"
    if s.num_prefill_tokens:
        yield "", f"{s.num_prefill_tokens} computed, {s.prefill_tokens_per_second:.1f} tokens/s"
    first = f"the first after {s.time_to_first_token_s:.2f} s"
    yield "answer", f"{_count(s.num_generated_tokens, 'token')}, {first}"
    decode = ""
    if s.num_decode_tokens:
        decode = f", {s.decode_tokens_per_second:.1f} once the prompt was computed"
    yield "", f"{s.tokens_per_second:.1f} tokens/s in all{decode}"
    size = f"{s.mean_batch_size:.1f} requests each"
    yield "steps", f"{s.num_steps} in {s.step_time_s:.2f} s, {size}"
    now = f", {s.num_blocks_used} now" if s.num_blocks_used else ""
    preempted = f", {_count(s.num_preemptions, 'preemption')}" if s.num_preemptions else ""
    share = f"{s.peak_blocks_used} of {_count(s.num_blocks, 'block')} at most"
    yield "KV cache", share + now + preempted


def _texts(s: EngineStats) -> Iterator[tuple[str, str]]:
    tokens = _count(s.num_prompt_tokens, "token")
    yield "texts", f"{s.num_first_tokens}, {tokens}, {s.prefill_tokens_per_second:.1f} tokens/s"
    size = f"{s.mean_batch_size:.1f} texts each"
    yield "steps", f"{s.num_steps} in {s.step_time_s:.2f} s, {size}"
    yield "pooling", s.pooling


def _hooks(hooks: Mapping[str, float]) -> str:
    each = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in hooks.items())
    return f"{sum(hooks.values()) * 1e3:.1f} ms ({each})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
