"""What can only be known on a GPU: backends, parity and speed, in one run of under ten minutes.

    python benchmarks/gpu_check.py [--wheels FOLDER] [--device cuda|cpu] [--quick]

No network is needed. `--wheels` installs FlashAttention 4 first, from wheels in a folder
(`pip install --no-index --find-links FOLDER flash-attn-4`). It needs pytest and
runnerctl[engine]. Every section stands alone, and within it every backend, runner and
contender: one that fails is shown with the end of its traceback, and the others go on.
Results go to stdout as one table and, if the variable OUT names a folder, to
`gpu_check.json` there, which is written anew after each section. The exit status is 1 if
anything FAILED. A backend that declines everything here is `declined`, which is no failure
and no success either.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

Row = tuple[str, str, str]
Run = Callable[[list[list[int]], int], None]

_SUITE = """
from runnerctl.plugins import PluginHost
from runnerctl.runner.attention.registry import load_backend
from runnerctl.testing import AttentionBackendConformance

class TestOnThisDevice(AttentionBackendConformance):
    backend = load_backend(PluginHost.discover().attention_backends[{name!r}])
    block_size = {block_size}
"""
# FlashAttention 2, and PyTorch's, page by 256 tokens
_BLOCK_SIZES = {"flash_attn": (16, 256), "torch_flash": (256,)}
# tests that compare with the reference; the others pass where every layer is declined
_COMPARING = re.compile(r"^PASSED .*::test_(a_ragged_batch|head_sizes)", re.MULTILINE)
_SUITE_SECONDS = 120
PROMPT_TOKENS = 128


def attempt(name: str, check: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a check; or the end of its traceback, so that the others go on."""
    try:
        return check()
    except Exception:
        last = traceback.format_exc().strip().splitlines()[-4:]
        return [(name, "FAILED", last[-1])] + [("", "", line.strip()) for line in last[:-1]]


def check_backends(device: str, quick: bool) -> list[Row]:
    """Each registered backend against the float64 reference; by the conformance classes."""
    from runnerctl.plugins import PluginHost

    names = ["sdpa"] if quick else list(PluginHost.discover().attention_backends)
    rows = []
    for name in names:
        for block_size in _BLOCK_SIZES.get(name, (16,)):
            title = f"backend {name}, blocks of {block_size}"
            rows += attempt(title, partial(check_backend, title, name, block_size, quick))
    return rows


def check_backend(title: str, name: str, block_size: int, quick: bool) -> list[Row]:
    """One backend in a process of its own, so that a kernel that crashes takes nothing along."""
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "test_backend.py"
        suite.write_text(_SUITE.format(name=name, block_size=block_size))
        command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
        command += [str(suite), *(["-k", "head_sizes"] if quick else [])]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SUITE_SECONDS, check=False
        )
    verdict, reasons = verdict_of(done.returncode, done.stdout, done.stderr)
    return [(title, *verdict), *(("", "", line) for line in reasons)]


def verdict_of(status: int, output: str, errors: str) -> tuple[tuple[str, str], list[str]]:
    """What pytest's words with `-rA` come to: verdict and summary, and lines that say why."""
    lines = (output.strip() or errors.strip() or "no output").splitlines()
    summary = lines[-1].strip("= ")
    if status:
        return ("FAILED", summary), [one[:160] for one in lines if one.startswith("FAILED")][:3]
    if not _COMPARING.search(output):
        reasons = [one.partition(": ")[2] for one in lines if "declined: " in one]
        return ("declined", summary), [one[:160] for one in reasons[:1]]
    return ("ok", summary), []


def check_parity(device: str, quick: bool) -> list[Row]:
    """Both runners against transformers' generate, in float32, with graphs and without."""
    from runnerctl.testing.tiny_models import make_tiny_model

    rows: list[Row] = []
    for family in ("llama",) if quick else ("llama", "gemma2", "mixtral"):
        with tempfile.TemporaryDirectory() as name:
            folder = make_tiny_model(family, Path(name) / family)
            for runner, eager, block_size in (
                ("v1", True, 16),
                ("v2", True, 16),
                ("v2", False, 16),
                ("v2", False, 256),
            ):
                title = f"parity {family} {runner}"
                settings = {"runner": runner, "enforce_eager": eager, "block_size": block_size}
                rows += attempt(title, partial(compare_tokens, title, folder, settings))
    return rows


def compare_tokens(title: str, folder: Path, settings: dict[str, Any]) -> list[Row]:
    """One runner's tokens with transformers' on the CPU, which may part at a near tie."""
    from runnerctl import LLM
    from runnerctl.testing.parity import assert_tokens, greedy, reference_tokens

    params = greedy(20)
    prompts = [[5, 9, 3], [17], list(range(40, 90)), [8] * 16, [3, 4] * 20]
    with LLM(folder, max_num_seqs=8, dtype="float32", **settings) as llm:
        outputs = llm.generate(prompts, params)
        backend = llm.stats().attention_backend
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == params.max_tokens, f"{len(tokens)} tokens of {params.max_tokens}"
        assert_tokens(tokens, reference_tokens(folder, prompt, params), f"prompt {prompt[:3]}")
    how = "eager" if settings["enforce_eager"] else "not eager"
    return [(title, "ok", f"{how}, blocks of {settings['block_size']}, {backend}")]


def make_model(folder: Path, quick: bool) -> tuple[int, int]:
    """A random Llama of about a billion parameters in bfloat16.

    Returns:
        The bytes that a decode step reads: of weights, and of keys and values for each token
        of context. Of the embedding it reads only a row for each token.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192}
    shape |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    if quick:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    vocab_size = 256 if quick else 32_000
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=4096, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    weights = [one for name, one in model.named_parameters() if "embed_tokens" not in name]
    head_size = shape["hidden_size"] // shape["num_attention_heads"]
    per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_size * 2
    return sum(one.numel() * one.element_size() for one in weights), per_token


def measure_speed(device: str, quick: bool) -> list[Row]:
    """V1, V2 and transformers at batches of 1, 16 and 64, and the share of the roofline."""
    import torch

    bandwidth = copy_bandwidth(torch.device(device))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bounds = partial(steps_per_second, bandwidth, *make_model(folder, quick))
        for title, start in contenders(folder, device, quick):
            rows += attempt(title, partial(measure, title, start, bounds, quick))
            if device == "cuda":
                torch.cuda.empty_cache()
    # contenders side by side, each batch in turn; sorting keeps their order
    rows.sort(key=lambda row: int(match[1]) if (match := re.match(r"decode (\d+)", row[0])) else 0)
    return [("memory bandwidth", f"{bandwidth / 1e9:.0f} GB/s", "by a copy"), *rows]


def steps_per_second(bandwidth: float, weights: int, per_token: int, tokens: float) -> float:
    """Decode steps that the memory allows with so many tokens of context in the batch."""
    return bandwidth / (weights + per_token * tokens)


def measure(title: str, start: Any, bounds: Callable[[float], float], quick: bool) -> list[Row]:
    """One contender, at every batch size."""
    new_tokens, repeats = (4, 1) if quick else (128, 3)
    rows = []
    with start() as (run, how):
        for batch in (1, 2) if quick else (1, 16, 64):
            prompts = [[(7 * i + j) % 200 + 5 for j in range(PROMPT_TOKENS)] for i in range(batch)]
            run(prompts, new_tokens)
            whole = min(timed(run, prompts, new_tokens) for _ in range(repeats))
            prefill = min(timed(run, prompts, 1) for _ in range(repeats))
            rate = batch * (new_tokens - 1) / max(1e-9, whole - prefill)
            bound = batch * bounds(batch * (PROMPT_TOKENS + new_tokens / 2))
            speed = f"prefill of {PROMPT_TOKENS * batch} tokens {prefill * 1e3:.0f} ms"
            detail = f"{rate / bound:.0%} of the roofline; {speed}{how}"
            rows.append((f"decode {batch}: {title}", f"{rate:.0f} tok/s", detail))
    return rows


def contenders(folder: Path, device: str, quick: bool) -> list[tuple[str, Any]]:
    """Title, and how to start it; one at a time has the GPU's memory to itself."""
    settings = [("v1", 16, False), ("v2", 16, False), ("v2", 16, True)]
    if not quick:
        settings.insert(2, ("v2", 256, False))
    found: list[tuple[str, Any]] = []
    for runner, block_size, eager in settings:
        title = f"{runner} ({'eager, ' if eager else ''}blocks of {block_size})"
        chosen = {"runner": runner, "block_size": block_size, "enforce_eager": eager or quick}
        found.append((title, partial(ours, folder, quick, chosen)))
    return [*found, ("transformers generate", partial(transformers_generate, folder, device))]


@contextmanager
def ours(folder: Path, quick: bool, chosen: dict[str, Any]) -> Iterator[tuple[Run, str]]:
    """One of our runners, and a few words on how it runs."""
    from runnerctl import LLM, SamplingParams

    with LLM(
        folder,
        dtype="bfloat16",
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**28 if quick else 8 * 2**30,
        **chosen,
    ) as llm:

        def run(prompts: list[list[int]], new_tokens: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
            llm.generate(prompts, params)

        yield run, f"; {llm.stats().attention_backend}"


@contextmanager
def transformers_generate(folder: Path, device: str) -> Iterator[tuple[Run, str]]:
    """The peer that is always there."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        if device == "cuda":
            torch.cuda.synchronize()

    yield run, ""


def timed(run: Callable[..., None], *arguments: Any) -> float:
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


def copy_bandwidth(device: Any) -> float:
    """Bytes read and written per second by a copy of a large tensor."""
    import torch

    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def describe(device: str, quick: bool) -> list[Row]:
    """The machine and the versions."""
    import torch
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return [("device", name, f"{versions}, Python {sys.version.split()[0]}")]


SECTIONS = {
    "machine": describe,
    "backends": check_backends,
    "parity": check_parity,
    "speed": measure_speed,
}


def run_section(name: str, device: str, quick: bool) -> list[Row]:
    """A section's rows, and how long it took."""
    started = time.perf_counter()
    rows = attempt(name, lambda: SECTIONS[name](device, quick))
    return [*rows, (f"({name})", f"{time.perf_counter() - started:.0f} s", "")]


def install_wheels(folder: Path) -> list[Row]:
    """FlashAttention 4 from wheels in a folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
    command += ["--find-links", str(folder), "flash-attn-4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stderr.strip() or "flash-attn-4").splitlines()[-1][:160]
    return [("wheels", "FAILED" if done.returncode else "installed", last)]


def show(rows: Sequence[Row]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, help="a folder with FlashAttention 4's wheels")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small shapes: does the script run?")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    args = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        import torch

        # every section would run on the CPU and say that all is well
        if not torch.cuda.is_available():
            parser.error("no GPU is visible here; --device cpu --quick tries the script out")
    rows = install_wheels(args.wheels) if args.wheels else []
    for name in args.sections.split(","):
        rows += run_section(name, args.device, args.quick)
        print(f"{name} done", file=sys.stderr, flush=True)
        if out := os.environ.get("OUT"):
            (Path(out) / "gpu_check.json").write_text(json.dumps(rows, indent=2))
    print(show(rows))
    return int(any(verdict == "FAILED" for _, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
