"""`runnerctl generate`: answers on stdout, or in a file; everything else goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runnerctl.cli import batch
from runnerctl.cli.generate_load import (
    ModelFlag,
    SystemFlag,
    as_unicode,
    load,
    note,
    resolve_model,
)
from runnerctl.cli.generate_records import answers
from runnerctl.cli.guard import stdout_is_unicode
from runnerctl.cli.sampling_flags import flags_named
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.errors import PromptError, UserError

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM
    from runnerctl.engine.outputs import FinishReason
    from runnerctl.resolve import Resolved

_FILE_PANEL = "Many prompts from a file"


class OutputFormat(StrEnum):
    """How the answer is printed."""

    text = "text"
    json = "json"


_Prompt = Annotated[
    str | None,
    typer.Argument(help="The prompt. Without it, or with -, stdin is read.", metavar="PROMPT"),
]
_Raw = Annotated[
    bool,
    typer.Option("--raw", help="Continue the prompt as it is, without the model's chat template."),
]
_Format = Annotated[
    OutputFormat | None,
    typer.Option(
        "--format",
        metavar="text|json",
        help="text (the default) comes as it is made, json when it is complete.",
    ),
]
_Stats = Annotated[bool, typer.Option("--stats", help="Report tokens and times.")]
_PromptsFile = Annotated[
    str | None,
    typer.Option(
        "--prompts-file",
        metavar="FILE",
        help="JSON lines with prompt, prompt_token_ids or messages; optional id and sampling "
        "fields, as in max_tokens. - is stdin.",
        rich_help_panel=_FILE_PANEL,
    ),
]
_AnswersFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Where the answers go, one JSON line each. Those it has are kept.",
        rich_help_panel=_FILE_PANEL,
    ),
]
_Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Start anew instead of keeping what --output has.",
        rich_help_panel=_FILE_PANEL,
    ),
]


def generate(  # noqa: PLR0913 - one parameter for each flag
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    params: SamplingParams,
    prompt: _Prompt = None,
    model: ModelFlag = None,
    raw: _Raw = False,
    system: SystemFlag = None,
    output: _Format = None,
    stats: _Stats = False,
    prompts_file: _PromptsFile = None,
    answers_file: _AnswersFile = None,
    overwrite: _Overwrite = False,
) -> None:
    """Answer PROMPT with a language model.

    The plugins choose the runner that serves it. The answer goes to stdout as it is made,
    and everything else to stderr.
    """
    if raw and system is not None:
        raise _no_template("--raw leaves it out")
    system = None if system is None else as_unicode(system, "--system")
    if prompts_file is not None:
        _check_batch_flags(prompt, output)
        asked_for = batch.Batch(prompts_file, answers_file, overwrite, params, raw, system)
        batch.run(asked_for, model, settings, config_file)
        return
    if answers_file is not None or overwrite:
        wrong = "--output" if answers_file is not None else "--overwrite"
        raise UserError(f"{wrong} goes with --prompts-file", setting=wrong)
    output = output or OutputFormat.text
    _check_format(params, output)
    text = _read_prompt(prompt)
    resolved = resolve_model(model, settings, config_file)
    llm = load(resolved)
    try:
        asked = _as_prompt(llm, text, raw=raw, system=system)
        with flags_named():
            if output is OutputFormat.text:
                _print_text(llm, asked, params, stats)
            else:
                _print_json(llm, asked, params, resolved, stats)
    finally:
        llm.close()


def _check_batch_flags(prompt: str | None, output: OutputFormat | None) -> None:
    if prompt is not None:
        raise UserError("--prompts-file and a PROMPT were both given", remedy="give one of them")
    if output is OutputFormat.text:
        raise UserError(
            "--format is text, but the answers to --prompts-file are JSON lines",
            remedy="leave it out",
            setting="--format",
        )


def _check_format(params: SamplingParams, output: OutputFormat) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and output is OutputFormat.text:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} needs --format json", setting=flag)


def _read_prompt(prompt: str | None) -> str:
    readable = sys.stdin is not None and (prompt == "-" or not sys.stdin.isatty())
    if prompt in (None, "-") and not readable:
        raise PromptError(
            "there is no prompt",
            remedy='give one, as in: runnerctl generate "Why is the sky blue?"',
        )
    if prompt in (None, "-"):
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as exc:
            raise PromptError(f"stdin is not {exc.encoding} text") from exc
    if not prompt or not prompt.strip():
        raise PromptError("the prompt is empty", remedy="give some text, or pipe some in")
    return as_unicode(prompt, "the prompt")


def _as_prompt(llm: LLM, text: str, *, raw: bool, system: str | None) -> Any:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    token_ids = None if raw else llm.chat_prompt(messages)
    if token_ids is not None:
        return {"prompt_token_ids": token_ids}
    if system is not None:
        raise _no_template("this model has none")
    return text


def _no_template(why: str) -> UserError:
    return UserError(f"--system needs a chat template, and {why}", setting="--system")


def _print_text(llm: LLM, prompt: Any, params: SamplingParams, stats: bool) -> None:
    """Print the answers in turn. The first comes as it is made, and what is ready follows it."""
    texts, counts = [""] * params.n, [0] * params.n
    reasons: list[FinishReason | None] = [None] * params.n
    current = 0
    _start_text(current, params.n)
    for delta in llm.stream([prompt], params):
        i = delta.output_index
        texts[i] += delta.text
        counts[i] += len(delta.token_ids)
        reasons[i] = delta.finish_reason or reasons[i]
        if i == current:
            print(delta.text, end="", flush=True)
        while current < params.n and reasons[current] is not None:
            _end_text(texts[current])
            current += 1
            if current < params.n:
                _start_text(current, params.n)
                print(texts[current], end="", flush=True)
    _say_if_cut_short(llm, params, zip(counts, reasons, strict=True))
    if stats:
        from runnerctl.cli.render import show
        from runnerctl.cli.stats import stats_report

        show(stats_report(llm.stats()), stderr=True)


def _start_text(index: int, count: int) -> None:
    if count > 1:
        print(f"{chr(10) if index else ''}--- {index + 1} of {count} ---", flush=True)


def _end_text(text: str) -> None:
    print("" if text.endswith("\n") else "\n", end="", flush=True)


def _print_json(
    llm: LLM, prompt: Any, params: SamplingParams, resolved: Resolved, stats: bool
) -> None:
    [output] = llm.generate([prompt], params)
    assert resolved.config is not None
    record: dict[str, Any] = {
        "model": resolved.config.model.model,
        "runner": resolved.decision.runner,
        **answers(output),
    }
    if stats:
        record["stats"] = llm.stats().to_dict()
    print(json.dumps(record, ensure_ascii=not stdout_is_unicode()))
    ends = ((len(one.token_ids), one.finish_reason) for one in output.outputs)
    _say_if_cut_short(llm, params, ends)


def _say_if_cut_short(
    llm: LLM, params: SamplingParams, ends: Iterable[tuple[int, FinishReason | None]]
) -> None:
    if any(reason == "length" and count < params.max_tokens for count, reason in ends):
        note(
            f"note: the answer was cut short: prompt and answer together may have "
            f"{llm.max_model_len} tokens, for which the KV cache or --max-model-len is the limit"
        )
