"""`runnerctl generate`: one answer, streamed to stdout; everything else goes to stderr."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runnerctl.cli.flags import MODEL_HELP
from runnerctl.cli.guard import USERS_FAULT, stdout_is_unicode
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.errors import PromptError, UserError

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM
    from runnerctl.resolve import Resolved

DEFAULT_MODEL = "smollm2-135m"


class OutputFormat(StrEnum):
    """How the answer is printed."""

    text = "text"
    json = "json"


def generate(  # noqa: PLR0913 - one parameter for each flag
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    params: SamplingParams,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. Without it, or with -, stdin is read.", metavar="PROMPT"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help=f"{MODEL_HELP} Default: {DEFAULT_MODEL}.", metavar="MODEL"),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Continue the prompt as it is, without the model's chat template."
        ),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option("--system", help="System message of the chat.", metavar="TEXT"),
    ] = None,
    output: Annotated[
        OutputFormat,
        typer.Option(
            "--format",
            metavar="text|json",
            help="text comes as it is made, json when it is complete.",
        ),
    ] = OutputFormat.text,
    stats: Annotated[bool, typer.Option("--stats", help="Report tokens and times.")] = False,
) -> None:
    """Answer PROMPT with a language model.

    The plugins choose the runner that serves it. The answer goes to stdout as it is made,
    and everything else to stderr.
    """
    if raw and system is not None:
        raise _no_template("--raw leaves it out")
    text = _read_prompt(prompt)
    system = None if system is None else _as_unicode(system, "--system")
    resolved = _resolve(model, settings, config_file)
    llm = _load(resolved)
    try:
        _answer(llm, _as_prompt(llm, text, raw=raw, system=system), params, resolved, output, stats)
    finally:
        llm.close()


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
    return _as_unicode(prompt, "the prompt")


def _as_unicode(text: str, what: str) -> str:
    """Text whose bytes Python could not read in the locale's encoding, read as UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as exc:
        raise PromptError(f"{what} is not UTF-8 text", remedy="convert it, with iconv say") from exc


def _resolve(model: str | None, settings: dict[str, Any], config_file: Path | None) -> Resolved:
    from runnerctl.resolve import resolve

    resolved = resolve(
        model,
        source="command line",
        config_file=config_file,
        default_model=DEFAULT_MODEL,
        **settings,
    )
    # MODEL is what the other commands call it
    problems = [
        replace(p, setting="--model" if p.setting == "MODEL" else p.setting)
        for p in resolved.decision.problems
    ]
    decision = replace(resolved.decision, problems=tuple(problems))
    from runnerctl.cli import render

    named = resolved.config.model.model if resolved.config else model
    if not decision.ok:
        render.show(render.validation_report(decision, named), stderr=True)
        raise typer.Exit(USERS_FAULT)
    line = f"{render.outcome(decision, named)} {render.reason(decision)}"
    render.show(line, stderr=True)
    if warnings := [p for p in decision.problems if p.severity == "warning"]:
        render.show(render.problem_list(warnings), stderr=True)
    return resolved


def _load(resolved: Resolved) -> LLM:
    from runnerctl.engine.llm import LLM

    return LLM.from_resolved(resolved)


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


def _answer(
    llm: LLM,
    prompt: Any,
    params: SamplingParams,
    resolved: Resolved,
    output: OutputFormat,
    stats: bool,
) -> None:
    text = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    for delta in llm.stream([prompt], params):
        text += delta.text
        token_ids += delta.token_ids
        finish_reason = delta.finish_reason or finish_reason
        if output is OutputFormat.text:
            print(delta.text, end="", flush=True)
    if output is OutputFormat.text:
        print("" if text.endswith("\n") else "\n", end="", flush=True)
    else:
        assert resolved.config is not None
        record: dict[str, Any] = {
            "model": resolved.config.model.model,
            "runner": resolved.decision.runner,
            "text": text,
            "token_ids": token_ids,
            "finish_reason": finish_reason,
        }
        if stats:
            record["stats"] = llm.stats().to_dict()
        print(json.dumps(record, ensure_ascii=not stdout_is_unicode()))
    if finish_reason == "length" and len(token_ids) < params.max_tokens:
        print(
            f"note: the answer was cut short: prompt and answer together may have "
            f"{llm.max_model_len} tokens, for which the KV cache or --max-model-len is the limit",
            file=sys.stderr,
        )
    if stats and output is OutputFormat.text:
        from runnerctl.cli.render import show
        from runnerctl.cli.stats import stats_report

        show(stats_report(llm.stats()), stderr=True)
