"""Generated tokens per second of runnerctl and of transformers' `generate`, in one run.

    python benchmarks/bench_generate.py [--repeats 3] [--dtype auto] [--json FILE]

The two take turns, so that a machine that slows down slows both. What counts is the
ratio; absolute numbers drift. Prompts are random tokens and the end token is ignored:
every request computes exactly the same number of tokens in both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from runnerctl import LLM, SamplingParams
from runnerctl.config.model_reference import read_model_config
from runnerctl.models.store import ensure_local

NEW_TOKENS = 128


def workloads(vocab_size: int) -> dict[str, list[list[int]]]:
    """Name -> prompts. Prompts are never repeated, so no prefix cache helps."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    return {
        "1 stream": [prompt(64)],
        "16 requests of 16-256 tokens": [prompt(rng.randint(16, 256)) for _ in range(16)],
    }


def transformers_generate(model: torch.nn.Module) -> Callable[[list[list[int]]], None]:
    """All prompts in one left-padded batch, as its users would."""

    def run(prompts: list[list[int]]) -> None:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            model.generate(  # type: ignore[operator]
                ids,
                attention_mask=mask,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )

    return run


def runnerctl_generate(llm: LLM) -> Callable[[list[list[int]]], None]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return lambda prompts: llm.generate(prompts, params) and None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    llm = LLM(args.model, dtype=args.dtype, enable_prefix_caching=False)
    runner = llm.decision.runner or "?"
    folder = ensure_local(read_model_config(args.model))
    paged = llm._engine._executor._runner._model  # type: ignore[union-attr, attr-defined]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=paged.dtype).eval()
    contenders = {
        f"runnerctl {runner}": runnerctl_generate(llm),
        "transformers generate": transformers_generate(reference),
    }
    print(
        f"{args.model}, {paged.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    results = []
    for workload, prompts in workloads(paged.vocab_size).items():
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(args.repeats + 1):
            for name, run in contenders.items():
                started = time.perf_counter()
                run(prompts)
                if repeat:  # the first is a warm-up
                    seconds[name].append(time.perf_counter() - started)
        tokens = len(prompts) * NEW_TOKENS
        rates = {name: [tokens / s for s in times] for name, times in seconds.items()}
        base = statistics.median(rates["transformers generate"])
        for name, rate in rates.items():
            median = statistics.median(rate)
            row = {
                "workload": workload,
                "contender": name,
                "tokens_per_second": round(median, 1),
                "spread": [round(min(rate), 1), round(max(rate), 1)],
                "ratio": round(median / base, 2),
            }
            results.append(row)
            print(
                f"{workload:30} {name:24} {median:7.1f} tok/s "
                f"({min(rate):.1f}-{max(rate):.1f})  {row['ratio']:.2f} x transformers"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))
    llm.close()


if __name__ == "__main__":
    main()
