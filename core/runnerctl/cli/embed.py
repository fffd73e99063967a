"""`runnerctl embed` and `runnerctl classify`: texts in, a line of JSON for each out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from runnerctl.cli import batch, batch_output
from runnerctl.cli.completion import models
from runnerctl.cli.embed_input import TextLine, check_texts, read_texts
from runnerctl.cli.flags import MODEL_HELP
from runnerctl.cli.generate_load import note, resolve_model
from runnerctl.cli.guard import INTERRUPTED
from runnerctl.engine.pooling_params import POOLING_MODES, PoolingParams
from runnerctl.errors import UserError

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM
    from runnerctl.resolve import Resolved

Task = Literal["embed", "classify"]
_DONE = {"embed": "embedded", "classify": "classified"}
_FILE_PANEL = "Many texts from a file"
# Texts that are read, sorted by length and written together, for each that may run at a time.
_CHUNK = 8

_Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL", autocompletion=models)]
_Texts = Annotated[
    list[str] | None,
    typer.Argument(
        help="Texts. Without any, or with -, each line of stdin is one.", metavar="TEXT"
    ),
]
_Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="JSON lines with prompt or prompt_token_ids, and optional id; for classify also "
        "text_pair. - is stdin.",
        rich_help_panel=_FILE_PANEL,
    ),
]
_Output = Annotated[
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
_Stats = Annotated[bool, typer.Option("--stats", help="Report tokens, times and the pooling.")]
_Truncate = Annotated[
    int | None,
    typer.Option(
        "--truncate-prompt-tokens",
        metavar="N",
        help="Cut longer texts to N tokens; -1: to what the model takes. Default: refuse them.",
    ),
]
_Pooling = Annotated[
    str | None,
    typer.Option(
        "--pooling",
        metavar="|".join(POOLING_MODES),
        help="How token vectors become one. Default: as the model's files say.",
    ),
]
_Normalize = Annotated[
    bool | None,
    typer.Option(
        "--normalize/--no-normalize",
        help="Scale embeddings to length 1. Default: as the model's files say.",
        show_default=False,
    ),
]
_Dimensions = Annotated[
    int | None,
    typer.Option("--dimensions", metavar="N", help="Keep the first N numbers of an embedding."),
]
_PromptName = Annotated[
    str | None,
    typer.Option(
        "--prompt-name",
        metavar="NAME",
        help="Put this prompt of config_sentence_transformers.json in front of each text.",
    ),
]
_Activation = Annotated[
    bool,
    typer.Option(
        "--activation/--no-activation",
        help="Give probabilities, or raw scores. Default: probabilities.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class _Work:
    """What a command was asked to do."""

    task: Task
    model: str
    texts: tuple[str, ...]
    source: str | None
    answers: Path | None
    overwrite: bool
    stats: bool


def embed(  # noqa: PLR0913 - one parameter for each flag
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    model: _Model,
    texts: _Texts = None,
    source: _Input = None,
    answers: _Output = None,
    overwrite: _Overwrite = False,
    pooling: _Pooling = None,
    normalize: _Normalize = None,
    dimensions: _Dimensions = None,
    truncate: _Truncate = None,
    prompt_name: _PromptName = None,
    stats: _Stats = False,
) -> None:
    """Turn texts into vectors with an embedding model.

    Each text gives a line of JSON with its embedding on stdout; everything else goes to
    stderr.
    """
    work = _Work("embed", model, tuple(texts or ()), source, answers, overwrite, stats)
    given = {
        "pooling": pooling,
        "normalize": normalize,
        "dimensions": dimensions,
        "truncate_prompt_tokens": truncate,
        "prompt_name": prompt_name,
    }
    _run(work, given, settings, config_file)


def classify(  # noqa: PLR0913 - one parameter for each flag
    *,
    settings: dict[str, Any],
    config_file: Path | None,
    model: _Model,
    texts: _Texts = None,
    source: _Input = None,
    answers: _Output = None,
    overwrite: _Overwrite = False,
    truncate: _Truncate = None,
    activation: _Activation = True,
    stats: _Stats = False,
) -> None:
    """Label texts with a classifier, or score them with a reward model.

    Each text gives a line of JSON on stdout: the likeliest label, and a number for each.
    """
    work = _Work("classify", model, tuple(texts or ()), source, answers, overwrite, stats)
    given = {"truncate_prompt_tokens": truncate, "activation": activation}
    _run(work, given, settings, config_file)


def _run(
    work: _Work, given: dict[str, Any], settings: dict[str, Any], config_file: Path | None
) -> None:
    with _flags_named():
        params = PoolingParams(**given)
    source = work.source or "-"
    batch.check_files(source, work.answers, overwrite=work.overwrite)
    lines = read_texts(work.texts, work.source, work.task)
    resolved = resolve_model(work.model, settings, config_file, default=None, setting="MODEL")
    assert resolved.config is not None
    context = (work.task, resolved.config.model.model, astuple(params))
    digests = {line.key: line.digest(*context) for line in lines}
    done: set[str | int] = set()
    length = 0
    if work.answers is not None and not work.overwrite:
        done, length = batch_output.finished(work.answers, digests)
    todo = [line for line in lines if line.key not in done]
    if todo:
        llm = _load(work, resolved)
        try:
            with _flags_named():
                check_texts(lambda texts: llm.check_texts(texts, params), todo, source)
                size = _CHUNK * resolved.config.scheduler.max_num_seqs
                _answer(llm, work, params, _chunks(todo, size), len(lines), length, digests)
            if work.stats:
                _show_stats(llm)
        finally:
            llm.close()
    if lines[0].line:
        kept = f", {len(done)} of them by an earlier run" if done else ""
        note(f"{len(lines)} of {len(lines)} texts {_DONE[work.task]}{kept}")


def _load(work: _Work, resolved: Resolved) -> LLM:
    assert resolved.config is not None
    facts = resolved.config.facts
    if facts is not None and facts.runner_type != "pooling":
        raise UserError(
            f"{work.model} generates text; it is no pooling model",
            remedy="take a model with the modules.json of sentence-transformers, or one whose "
            "architecture in config.json embeds or classifies (all-minilm-l6-v2, say)",
            setting="MODEL",
        )
    from runnerctl.engine.llm import LLM

    llm = LLM.from_resolved(resolved)
    pooling = llm.pooling_facts
    assert pooling is not None
    if pooling.task != work.task:
        llm.close()
        what = "embeds" if pooling.task == "embed" else "classifies"
        raise UserError(
            f"{work.model} {what} texts", remedy=f"use runnerctl {pooling.task}", setting="MODEL"
        )
    if pooling.is_guess:
        note(f"note: {pooling.method}; --pooling and --normalize say otherwise")
    return llm


def _answer(
    llm: LLM,
    work: _Work,
    params: PoolingParams,
    chunks: list[list[TextLine]],
    total: int,
    length: int,
    digests: dict[str | int, str],
) -> None:
    """Write an answer to each text, in order, chunk by chunk."""
    kept = total - sum(map(len, chunks))
    answered = 0
    started = time.perf_counter()
    try:
        with (
            batch.writer(work.answers, length) as write,
            batch.progress(work.answers, total, kept) as advance,
        ):
            for chunk in chunks:
                records = _records(llm, work.task, params, chunk)
                for line, record in zip(chunk, records, strict=True):
                    named: dict[str, Any] = {"index": line.index}
                    named |= {} if line.id is None else {"id": line.id}
                    named |= {} if work.answers is None else {"digest": digests[line.key]}
                    write({**named, **record})
                    answered += 1
                    advance()
    except KeyboardInterrupt:
        if not chunks[0][0].line:
            raise
        how = "goes on from there" if work.answers else "with --output FILE could go on from there"
        done = f"{kept + answered} of {total} texts {_DONE[work.task]}"
        note(f"\ninterrupted: {done}; the same command {how}")
        raise typer.Exit(INTERRUPTED) from None
    if chunks[0][0].line:
        seconds = time.perf_counter() - started
        tokens = llm.stats().num_prompt_tokens
        note(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s")


def _records(
    llm: LLM, task: Task, params: PoolingParams, lines: list[TextLine]
) -> Iterator[dict[str, Any]]:
    contents = [line.content for line in lines]
    if task == "embed":
        for embedded in llm.embed(contents, params):
            yield {"embedding": _short(embedded.embedding)}
        return
    for one in llm.classify(contents, params):
        probs = dict(zip(one.labels, _short(one.probs), strict=True))
        yield {"label": one.label, "probs": probs}


def _short(numbers: list[float]) -> list[float]:
    """The same float32 numbers, in as many digits as tell them apart."""
    return [float(f"{number:.9g}") for number in numbers]


def _chunks(lines: list[TextLine], size: int) -> list[list[TextLine]]:
    return [lines[i : i + size] for i in range(0, len(lines), size)]


def _show_stats(llm: LLM) -> None:
    from runnerctl.cli.render import show
    from runnerctl.cli.stats import stats_report

    show(stats_report(llm.stats()), stderr=True)


@contextmanager
def _flags_named() -> Iterator[None]:
    """What raises inside calls a field of `PoolingParams` by its flag."""
    try:
        yield
    except UserError as exc:
        setting = exc.setting
        if setting in {field.name for field in fields(PoolingParams)}:
            setting = _flag(setting)
        exc.message, exc.remedy, exc.setting = (
            _in_flags(exc.message),
            _in_flags(exc.remedy),
            setting,
        )
        raise


def _in_flags(text: str) -> str:
    """A text with the fields it mentions as flags; those of one word are words as well."""
    for name in ("truncate_prompt_tokens", "prompt_name"):
        text = text.replace(name, _flag(name))
    return text


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
