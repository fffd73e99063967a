"""What ranks gain and cost, in one run, each rank on one thread.

    python benchmarks/bench_parallel.py prefill   [--ranks 1,2] [--tokens 2000]
    python benchmarks/bench_parallel.py executors [--ranks 1,2] [--new-tokens 64]
    both: [--model smollm2-135m] [--dtype float32] [--repeats 5] [--json FILE]

`prefill`: the time to the first token of one prompt, by the number of ranks that share it
(prefill context parallelism, executor mp). `executors`: the throughput of 16 requests in this
process, in workers and in actors of a local Ray, and what a step costs beyond the first.

All engines are open at once and compute in turns, so a machine that slows down slows all of
them. Prompts are random and never repeated; prefixes are not cached.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: of this process, and of each rank

from runnerctl import LLM, SamplingParams

BATCH = 16


def main() -> None:
    arguments = parse()
    ranks = [int(word) for word in arguments.ranks.split(",")]
    rng = random.Random(0)
    with ExitStack() as stack:
        if arguments.what == "prefill":
            work, contenders = prefill(arguments, ranks, rng)
        else:
            work, contenders = executors(arguments, ranks, rng)
        engines = {}
        for name, settings in contenders.items():
            started = time.perf_counter()
            engines[name] = stack.enter_context(LLM(arguments.model, **settings))
            print(f"- {name}: {time.perf_counter() - started:.1f} s to start", flush=True)
        seconds, steps = measure(engines, work, arguments.repeats)
    report(arguments, seconds, steps)


def prefill(
    arguments: argparse.Namespace, ranks: list[int], rng: random.Random
) -> tuple[Callable[[LLM], None], dict[str, dict[str, object]]]:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def work(llm: LLM) -> None:
        llm.generate([prompt(llm, rng, arguments.tokens)], params)

    common = {**settings_of(arguments), "distributed_executor_backend": "mp", "runner": "v2"}
    length = {"max_model_len": arguments.tokens + 16, "max_num_batched_tokens": arguments.tokens}
    return work, {
        f"{count} rank{'s' * (count > 1)}": common
        | length
        | {"prefill_context_parallel_size": count}
        for count in ranks
    }


def executors(
    arguments: argparse.Namespace, ranks: list[int], rng: random.Random
) -> tuple[Callable[[LLM], None], dict[str, dict[str, object]]]:
    params = SamplingParams(temperature=0, max_tokens=arguments.new_tokens, ignore_eos=True)

    def work(llm: LLM) -> None:
        llm.generate([prompt(llm, rng, rng.randint(16, 128)) for _ in range(BATCH)], params)

    common = {**settings_of(arguments), "runner": "v2", "max_model_len": 512}
    contenders: dict[str, dict[str, object]] = {}
    for count in ranks:
        for name in ("uni", "mp", "ray") if count == 1 else ("mp", "ray"):
            contenders[f"{name}, {count} rank{'s' * (count > 1)}"] = common | {
                "distributed_executor_backend": name,
                "prefill_context_parallel_size": count,
            }
    return work, contenders


def prompt(llm: LLM, rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(3, llm.vocab_size), k=length)


def settings_of(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "dtype": arguments.dtype,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 400_000_000,
    }


def measure(
    engines: dict[str, LLM], work: Callable[[LLM], None], repeats: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each round after the first, and the steps of one round."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    steps = {}
    for round_ in range(repeats + 1):
        for name, llm in engines.items():
            before = llm.stats().num_steps
            started = time.perf_counter()
            work(llm)
            if round_:
                seconds[name].append(time.perf_counter() - started)
            steps[name] = llm.stats().num_steps - before
    return seconds, steps


def report(
    arguments: argparse.Namespace, seconds: dict[str, list[float]], steps: dict[str, int]
) -> None:
    base = statistics.median(next(iter(seconds.values())))
    base_steps = next(iter(steps.values()))
    print(
        f"\n{arguments.model}, {arguments.dtype}, {os.environ['OMP_NUM_THREADS']} thread a rank\n"
    )
    print("| contender | seconds: median (range) | x first | ms a step (beyond the first's) |")
    print("| --- | --- | --- | --- |")
    for name, found in seconds.items():
        median = statistics.median(found)
        each = 1000 * median / steps[name]
        beyond = each - 1000 * base / base_steps
        spread = f"{median:.2f} ({min(found):.2f}-{max(found):.2f})"
        print(f"| {name} | {spread} | {base / median:.2f} | {each:.1f} ({beyond:+.1f}) |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds": seconds, "steps": steps}, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("prefill", "executors"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
