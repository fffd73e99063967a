"""`runnerctl bench`: how fast a model answers here, with the settings that `generate` takes."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from runnerctl.cli.flags import Format
from runnerctl.cli.generate_load import ModelFlag, load, note, resolve_model
from runnerctl.cli.guard import stdout_is_unicode

_WORK_PANEL = "Workload"


class Mode(StrEnum):
    """What is measured."""

    throughput = "throughput"
    latency = "latency"
    prefill = "prefill"


def _work(flag: str, metavar: str, text: str, **limits: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=_WORK_PANEL, **limits)


_Mode = Annotated[
    Mode,
    typer.Argument(
        metavar="throughput|latency|prefill",
        help="throughput (the default): all prompts at once; latency: one after the other; "
        "prefill: one after the other, with one token generated for each.",
    ),
]
_NumPrompts = Annotated[
    int | None, _work("--num-prompts", "N", "Default: 16, or 4 one after the other.", min=1)
]
_PromptTokens = Annotated[
    str | None,
    _work(
        "--prompt-tokens",
        "N|N-M",
        "Tokens of a prompt, or the range they are drawn from. Default: 128; prefill: 512.",
    ),
]
_MaxTokens = Annotated[
    int | None,
    _work("--max-tokens", "N", "Tokens generated for each prompt. Default: 64.", min=1),
]
_Seed = Annotated[int | None, _work("--seed", "N", "Of the random prompts. Default: 0.")]
_PromptsFile = Annotated[
    str | None,
    _work(
        "--prompts-file",
        "FILE",
        "Prompts to take instead of random ones, as for generate. - is stdin.",
    ),
]
_Repeats = Annotated[int, _work("--repeats", "N", "Rounds that count. Default: 3.", min=1)]
_Warmup = Annotated[int, _work("--warmup", "N", "Rounds before those. Default: 1.", min=0)]
_Format = Annotated[
    Format, typer.Option("--format", metavar="table|json", help="A table to read, or JSON.")
]


def bench(  # noqa: PLR0913 - one parameter for each flag
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    mode: _Mode = Mode.throughput,
    model: ModelFlag = None,
    num_prompts: _NumPrompts = None,
    prompt_tokens: _PromptTokens = None,
    max_tokens: _MaxTokens = None,
    seed: _Seed = None,
    prompts_file: _PromptsFile = None,
    repeats: _Repeats = 3,
    warmup: _Warmup = 1,
    output: _Format = Format.table,
) -> None:
    """Measure how fast a model answers.

    Decoding is greedy and does not stop at the end token, so that every round computes the
    same number of tokens. The prefix cache is off unless some setting turns it on.
    """
    from runnerctl.cli.bench_work import Flags, plan, requests

    work = plan(Flags(mode.value, num_prompts, prompt_tokens, max_tokens, seed, prompts_file))
    resolved = resolve_model(model, _without_prefix_cache(settings, config_file), config_file)
    from runnerctl.cli.bench_measure import run_rounds
    from runnerctl.cli.bench_report import record_of, report, setting_of

    llm = load(resolved)
    try:
        asked = requests(llm, work)
        rounds = run_rounds(llm, asked, work, repeats=repeats, warmup=warmup, say=note)
        record = record_of(work, rounds, warmup) | setting_of(llm, resolved)
    finally:
        llm.close()
    if output is Format.json:
        print(json.dumps(record, indent=2, ensure_ascii=not stdout_is_unicode()))
        return
    from runnerctl.cli.render import show

    show(report(record))


def _without_prefix_cache(settings: dict[str, Any], config_file: Path | None) -> dict[str, Any]:
    """The settings with the prefix cache off, unless a flag, the file or a variable says.

    A cached prompt is not computed, and every round asks the same.
    """
    from runnerctl.config.settings import resolve_settings

    given = resolve_settings(
        settings, source="command line", config_file=config_file, environ=os.environ
    )
    if "enable_prefix_caching" in given.values:
        return settings
    return {**settings, "enable_prefix_caching": False}
