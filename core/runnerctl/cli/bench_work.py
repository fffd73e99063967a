"""What `runnerctl bench` has a model do: the prompts of a workload, made up or from a file."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runnerctl.cli import batch
from runnerctl.cli.batch_input import PromptLine, read_prompts
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.errors import UserError

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM

MODES = {
    "throughput": "all prompts at once",
    "latency": "one prompt after the other",
    "prefill": "one prompt after the other, one token each",
}
# prompts, tokens of each, tokens generated for each: a minute or two on a small CPU
DEFAULTS = {
    "throughput": (16, "128", 64),
    "latency": (4, "128", 64),
    "prefill": (4, "512", 1),
}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Workload:
    """What one round consists of.

    Attributes:
        mode: a key of `MODES`.
        num_prompts, prompt_tokens, seed: of made-up prompts; lengths are drawn from the
            range `prompt_tokens`, both ends included.
        max_tokens: generated for each prompt; lines of a file may say otherwise.
        lines: the prompts of a file instead; None without one.
        source: that file; `-` is stdin.
    """

    mode: str
    num_prompts: int
    prompt_tokens: tuple[int, int]
    max_tokens: int
    seed: int
    lines: tuple[PromptLine, ...] | None = None
    source: str | None = None

    @property
    def one_by_one(self) -> bool:
        """Whether a prompt waits for the answer to the one before it."""
        return self.mode != "throughput"


@dataclass(frozen=True, slots=True)
class Flags:
    """The workload's flags; None is not given."""

    mode: str
    num_prompts: int | None
    prompt_tokens: str | None
    max_tokens: int | None
    seed: int | None
    prompts_file: str | None


def plan(flags: Flags) -> Workload:
    """The workload that was asked for; a file of prompts is read and checked as a whole.

    Raises:
        UserError: flags that do not go together, a bad range, a bad file.
    """
    count, length, new = DEFAULTS[flags.mode]
    if flags.mode == "prefill" and flags.max_tokens not in (None, 1):
        raise UserError(
            f"--max-tokens is {flags.max_tokens}, but prefill generates one token for each prompt",
            remedy="leave it out, or take the mode latency",
            setting="--max-tokens",
        )
    work = Workload(
        flags.mode,
        flags.num_prompts or count,
        _parse_range(flags.prompt_tokens or length),
        flags.max_tokens or new,
        flags.seed or 0,
    )
    if flags.prompts_file is None:
        return work
    for name in ("num_prompts", "prompt_tokens", "seed"):
        if getattr(flags, name) is not None:
            wrong = "--" + name.replace("_", "-")
            raise UserError(
                f"{wrong} is of made-up prompts, and --prompts-file brings its own",
                remedy="give one of them",
                setting=wrong,
            )
    params = SamplingParams(temperature=0, max_tokens=work.max_tokens, ignore_eos=True)
    lines = read_prompts(flags.prompts_file, params, raw=False)
    if work.mode == "prefill":
        lines = [
            replace(line, params=replace(line.params, max_tokens=1, min_tokens=0)) for line in lines
        ]
    return replace(work, num_prompts=len(lines), lines=tuple(lines), source=flags.prompts_file)


def requests(llm: LLM, work: Workload) -> list[tuple[Any, SamplingParams]]:
    """A round's prompts, with the parameters of each.

    Raises:
        UserError: one does not fit the model; nothing was run.
    """
    if work.lines is not None:
        from_file = batch.Batch(
            work.source or "-", None, False, SamplingParams(), raw=False, system=None
        )
        batch.check_prompts(llm, from_file, work.lines)
        asked = [(batch.as_prompt(llm, from_file, line), line.params) for line in work.lines]
    else:
        _check_length(work, llm.max_model_len)
        params = SamplingParams(temperature=0, max_tokens=work.max_tokens, ignore_eos=True)
        asked = [(prompt, params) for prompt in synthetic(work, llm.vocab_size)]
    return asked


def synthetic(work: Workload, vocab_size: int) -> Sequence[Any]:
    """Made-up prompts: random token ids, the same for the same seed."""
    rng = random.Random(work.seed)
    lengths = [rng.randint(*work.prompt_tokens) for _ in range(work.num_prompts)]
    return [
        {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(length)]}
        for length in lengths
    ]


def _check_length(work: Workload, max_model_len: int) -> None:
    needed = work.prompt_tokens[1] + work.max_tokens
    if needed > max_model_len:
        raise UserError(
            f"prompts of {work.prompt_tokens[1]} tokens and answers of {work.max_tokens} need "
            f"{needed} tokens, and prompt and answer together may have {max_model_len}",
            remedy="lower --prompt-tokens or --max-tokens, or raise --max-model-len or the "
            "KV cache where they are the limit",
            setting="--prompt-tokens",
        )


def _parse_range(text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise UserError(
            f"--prompt-tokens is {text!r}; it must be a number of tokens, or a range as in 16-256",
            setting="--prompt-tokens",
        )
    return low, high
