"""`runnerctl generate --prompts-file`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from runnerctl.cli import batch_output
from runnerctl.cli.batch_input import PromptLine, bad_lines, on_one_line, read_prompts
from runnerctl.cli.generate_load import load, note, resolve_model
from runnerctl.cli.generate_records import answers
from runnerctl.cli.guard import INTERRUPTED, stdout_is_unicode
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.errors import PromptError, UserError

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Batch:
    """What `generate` was asked to do with a file.

    Attributes:
        prompts: the file of prompts; `-` is stdin.
        answers: the file of answers; None is stdout.
        overwrite: forget the answers that the file has.
        params: for fields that a prompt does not set.
        raw: leave out the chat template.
        system: message that begins conversations which have none.
    """

    prompts: str
    answers: Path | None
    overwrite: bool
    params: SamplingParams
    raw: bool
    system: str | None


@dataclass(slots=True)
class _Tally:
    total: int
    kept: int = 0
    answered: int = 0
    tokens: int = 0

    @property
    def done(self) -> int:
        return self.kept + self.answered


def run(
    batch: Batch, model: str | None, settings: dict[str, Any], config_file: Path | None
) -> None:
    """Answer every prompt that the file of answers does not have yet.

    Raises:
        UserError: a prompt, a flag or a file is wrong; nothing was run, no file changed.
        typer.Exit: the configuration cannot be served, or Ctrl-C came.
    """
    check_files(batch.prompts, batch.answers, overwrite=batch.overwrite)
    lines = read_prompts(batch.prompts, batch.params, raw=batch.raw)
    resolved = resolve_model(model, settings, config_file)
    assert resolved.config is not None
    context = (resolved.config.model.model, batch.raw, batch.system)
    digests = {line.key: line.digest(*context) for line in lines}
    done: set[str | int] = set()
    length = 0
    if batch.answers is not None and not batch.overwrite:
        done, length = batch_output.finished(batch.answers, digests)
    tally = _Tally(len(lines), len(done))
    todo = [line for line in lines if line.key not in done]
    if todo:
        # twice as many as run at a time: one that ends always finds its successor queued
        window = 2 * resolved.config.scheduler.max_num_seqs
        llm = load(resolved)
        try:
            check_prompts(llm, batch, todo)
            _answer(llm, batch, todo, digests, tally, length, window)
        finally:
            llm.close()
    note(f"{tally.done} of {tally.total} prompts answered{_kept(tally)}")


def check_files(source: str, path: Path | None, *, overwrite: bool) -> None:
    """See whether the answers to the prompts of `source` may go to `path`.

    Raises:
        UserError: they cannot, or it is the file of prompts itself.
    """
    if path is None:
        if overwrite:
            raise UserError("--overwrite goes with --output", setting="--overwrite")
        return
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UserError(f"{path} {what}", setting="--output")
    same = source != "-" and path.exists() and Path(source).exists()
    if same and path.samefile(source):
        raise UserError(f"{path} is the file of prompts", setting="--output")


def check_prompts(llm: LLM, batch: Batch, lines: Sequence[PromptLine]) -> None:
    """See whether the model takes every prompt.

    Raises:
        PromptError: lists every line that it does not.
    """
    problems = []
    for line in lines:
        try:
            llm.check(as_prompt(llm, batch, line), line.params)
        except UserError as exc:
            problems.append((line.line, on_one_line(exc)))
    if problems:
        raise bad_lines(batch.prompts, problems)


def as_prompt(llm: LLM, batch: Batch, line: PromptLine) -> Any:
    """A line as `LLM` takes it, through the model's chat template where that applies.

    Raises:
        PromptError: it needs a chat template, and the model has none.
    """
    if line.form == "prompt_token_ids" or batch.raw:
        return {line.form: line.content}
    is_text = line.form == "prompt"
    messages = [{"role": "user", "content": line.content}] if is_text else list(line.content)
    if batch.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": batch.system})
    token_ids = llm.chat_prompt(messages)
    if token_ids is not None:
        return {"prompt_token_ids": token_ids}
    if is_text and batch.system is None:
        return line.content
    what = "--system needs" if is_text else "'messages' need"
    raise PromptError(f"{what} a chat template, and this model has none")


def _answer(
    llm: LLM,
    batch: Batch,
    lines: Sequence[PromptLine],
    digests: dict[str | int, str],
    tally: _Tally,
    length: int,
    window: int,
) -> None:
    prompts = ((line, as_prompt(llm, batch, line), line.params) for line in lines)
    path = batch.answers
    started = time.perf_counter()
    try:
        with writer(path, length) as write, progress(path, tally.total, tally.kept) as advance:
            for line, output in llm.generate_each(prompts, window=window):
                named = {"index": line.index} | ({} if line.id is None else {"id": line.id})
                write({**named, "digest": digests[line.key], **answers(output)})
                tally.answered += 1
                tally.tokens += sum(len(one.token_ids) for one in output.outputs)
                advance()
    except KeyboardInterrupt:
        how = "goes on from there" if path else "with --output FILE could go on from there"
        note(
            f"\ninterrupted: {tally.done} of {tally.total} prompts answered; the same command {how}"
        )
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.perf_counter() - started
    note(f"{tally.tokens} tokens in {seconds:.1f} s, {tally.tokens / seconds:.1f} tokens/s")


@contextmanager
def writer(path: Path | None, length: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """How to write one record, so that it is out when the call returns."""
    if path is None:

        def show(record: dict[str, Any]) -> None:
            text = batch_output.line_of(record, ascii_only=not stdout_is_unicode())
            print(text, end="", flush=True)

        yield show
        return
    with batch_output.open_for_answers(path, length) as file:
        yield lambda record: _write_all(file.fileno(), batch_output.line_of(record).encode())


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


@contextmanager
def progress(path: Path | None, total: int, completed: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal that shows no answers; how to move it on by one.

    Args:
        path: where the answers go; None is stdout.
        total, completed: how many there will be, and how many there are.
    """
    shows_answers = path is None and sys.stdout.isatty()
    if shows_answers or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    )
    with bar:
        task = bar.add_task("", total=total, completed=completed)
        yield lambda: bar.advance(task)


def _kept(tally: _Tally) -> str:
    return f", {tally.kept} of them by an earlier run" if tally.kept else ""
