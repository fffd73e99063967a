"""What `runnerctl bench` reports: a record for JSON, and a table of the same for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from runnerctl.cli.bench_measure import Round, percentiles, spread
from runnerctl.cli.bench_work import MODES, Workload

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM
    from runnerctl.resolve import Resolved


def record_of(work: Workload, rounds: Sequence[Round], warmup: int) -> dict[str, Any]:
    """The workload and its numbers. Counts are of one round; times are in seconds."""
    one = rounds[-1]
    prefill = [rate for r in rounds if (rate := r.prefill_tokens_per_second) is not None]
    return {
        "mode": work.mode,
        "workload": {
            "source": work.source or "synthetic",
            "seed": None if work.source else work.seed,
            "num_prompts": work.num_prompts,
            "num_prompt_tokens": one.prompt_tokens,
            "num_cached_tokens": one.cached_tokens,
            "num_generated_tokens": one.generated_tokens,
            "repeats": len(rounds),
            "warmup": warmup,
        },
        "tokens_per_second": spread([r.tokens_per_second for r in rounds]),
        "prefill_tokens_per_second": spread(prefill),
        **{
            name: percentiles([value for r in rounds for value in getattr(r, name)])
            for name in ("time_to_first_token_s", "time_per_output_token_s", "latency_s")
        },
        "round_s": [r.seconds for r in rounds],
    }


def setting_of(llm: LLM, resolved: Resolved) -> dict[str, Any]:
    """What was measured, and on what: model, runner, types, versions, threads."""
    import torch
    import transformers

    from runnerctl import __version__
    from runnerctl.runner.memory import default_device

    config = resolved.config
    assert config is not None
    device = default_device()
    stats = llm.stats()
    is_gpu = device.type == "cuda"
    return {
        "model": config.model.model,
        "runner": resolved.decision.runner,
        "attention_backend": stats.attention_backend,
        "transforms": [f"{t.stage} {t.name} ({t.plugin}): {t.report}" for t in stats.transforms],
        "dtype": stats.dtype,
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
        "threads": torch.get_num_threads(),
        "block_size": config.cache.block_size,
        "prefix_caching": config.cache.enable_prefix_caching,
        "enforce_eager": config.runner.enforce_eager,
        "versions": {
            "runnerctl": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def report(record: Mapping[str, Any]) -> RenderableType:
    """The table for people."""
    setting = Table.grid(padding=(0, 2))
    for row in _setting(record):
        setting.add_row(*row)
    rates = _table("TOKENS/S", "MEDIAN", "MIN", "MAX")
    for title, key in (
        ("generated", "tokens_per_second"),
        ("prefill", "prefill_tokens_per_second"),
    ):
        if record["mode"] == "prefill" and key == "tokens_per_second":
            continue  # one token a prompt says nothing of generating
        if record[key] is not None:
            rates.add_row(title, *(f"{record[key][name]:.1f}" for name in ("median", "min", "max")))
    times = _table("MILLISECONDS", "MEAN", "P50", "P90", "P99")
    for title, key in (
        ("time to first token", "time_to_first_token_s"),
        ("time per output token", "time_per_output_token_s"),
        ("whole answer", "latency_s"),
    ):
        if record[key] is not None and not (record["mode"] == "prefill" and key == "latency_s"):
            names = ("mean", "p50", "p90", "p99")
            times.add_row(title, *(f"{record[key][name] * 1e3:.1f}" for name in names))
    return Group(setting, "", rates, "", times)


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(title, min_width=21)
    for column in columns:
        table.add_column(column, justify="right", min_width=8)
    return table


def _setting(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    work, versions = record["workload"], record["versions"]
    yield "mode", f"{record['mode']}: {MODES[record['mode']]}"
    source = work["source"]
    made = f"random tokens, seed {work['seed']}" if source == "synthetic" else f"from {source}"
    prompts = "prompt" if work["num_prompts"] == 1 else "prompts"
    yield (
        "workload",
        f"{work['num_prompts']} {prompts} ({made}), {work['num_prompt_tokens']} tokens; "
        f"{work['num_generated_tokens']} generated",
    )
    yield "rounds", f"{work['repeats']}, after {work['warmup']} to warm up"
    cached = f"on, {work['num_cached_tokens']} prompt tokens came from it in the last round"
    yield "prefix cache", cached if record["prefix_caching"] else "off"
    yield "model", ", ".join(filter(None, (record["model"], record["dtype"])))
    eager = ", eager" if record["enforce_eager"] else ""
    yield "runner", f"{record['runner']}{eager}, attention {record['attention_backend'] or '-'}"
    heading = "transforms"
    for line in record["transforms"]:
        yield heading, line
        heading = ""
    threads = record["threads"]
    yield (
        "machine",
        f"{record['device']}, {threads} {'thread' if threads == 1 else 'threads'}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}",
    )
