"""What can only be known on a GPU: backends, parity and speed, in one run of under ten minutes.

    python benchmarks/gpu_check.py [--wheels FOLDER] [--device cuda|cpu] [--quick]

No network is needed. `--wheels` installs FlashAttention 4 first, from wheels in a folder
(`pip install --no-index --find-links FOLDER flash-attn-4`). It needs pytest and
runnerctl[engine]. Every section stands alone: one that fails is shown with the end of its
traceback, and the others go on. Results go to stdout as one table and, if the variable OUT
names a folder, to `gpu_check.json` there. The exit status is 1 if a backend or the parity
of a runner failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = tuple[str, str, str]

_SUITE = """
from runnerctl.plugins import PluginHost
from runnerctl.runner.attention.registry import load_backend
from runnerctl.testing import AttentionBackendConformance

class TestOnThisDevice(AttentionBackendConformance):
    backend = load_backend(PluginHost().attention_backends[{name!r}])
    block_size = {block_size}
"""
# (backend, block size): FlashAttention 2, and PyTorch's, page by 256 tokens
_BACKENDS = (("sdpa", 16), ("flash_attn", 16), ("flash_attn", 256), ("torch_flash", 256))


def check_backends(device: str, quick: bool) -> list[Row]:
    """Each backend against the float64 reference; by the conformance classes."""
    rows = []
    for name, block_size in _BACKENDS[:1] if quick else _BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            suite = Path(folder) / "test_backend.py"
            suite.write_text(_SUITE.format(name=name, block_size=block_size))
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)]
            if quick:
                command += ["-k", "head_sizes"]
            environment = dict(os.environ)
            if device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=180, check=False, env=environment
            )
        lines = done.stdout.strip().splitlines() or ["no output"]
        failed = [line for line in lines if line.startswith("FAILED")]
        verdict = "ok" if done.returncode == 0 else "FAILED"
        rows.append((f"backend {name}, blocks of {block_size}", verdict, lines[-1].strip("= ")))
        rows += [("", "", line[:160]) for line in failed[:3]]
    return rows


def check_parity(device: str, quick: bool) -> list[Row]:
    """Both runners against transformers' generate, in float32, with graphs and without."""
    from runnerctl import LLM, SamplingParams
    from runnerctl.testing.tiny_models import make_tiny_model, reference_generate

    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[5, 9, 3], [17], list(range(40, 90)), [8] * 16, [3, 4] * 20]
    rows = []
    for family in ("llama",) if quick else ("llama", "gemma2", "mixtral"):
        with tempfile.TemporaryDirectory() as name:
            folder = make_tiny_model(family, Path(name) / family)
            expected = [reference_generate(folder, prompt, 20)[0] for prompt in prompts]
            for runner, eager, block_size in (
                ("v1", True, 16),
                ("v2", True, 16),
                ("v2", False, 16),
                ("v2", False, 256),
            ):
                settings = {"enforce_eager": eager, "block_size": block_size, "dtype": "float32"}
                with LLM(folder, runner=runner, max_num_seqs=8, **settings) as llm:
                    outputs = llm.generate(prompts, greedy)
                    backend = llm.stats().attention_backend
                found = [list(output.outputs[0].token_ids) for output in outputs]
                verdict = "ok" if found == expected else "FAILED"
                how = f"{'eager' if eager else 'not eager'}, blocks of {block_size}, {backend}"
                rows.append((f"parity {family} {runner}", verdict, how))
    return rows


def make_model(folder: Path, quick: bool) -> int:
    """A random Llama of about a billion parameters in bfloat16; returns its bytes."""
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
    return sum(one.numel() * one.element_size() for one in model.parameters())


def measure_speed(device: str, quick: bool) -> list[Row]:
    """V1, V2 and transformers at batches of 1, 16 and 64, and the share of the roofline."""
    import torch

    bandwidth = copy_bandwidth(torch.device(device))
    rows: list[Row] = [("memory bandwidth", f"{bandwidth / 1e9:.0f} GB/s", "by a copy")]
    new_tokens = 4 if quick else 128
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_bytes = make_model(folder, quick)
        for batch in (1, 2) if quick else (1, 16, 64):
            prompts = [[(7 * i + j) % 200 + 5 for j in range(128)] for i in range(batch)]
            bound = batch * bandwidth / num_bytes  # weights only: KV of 256 tokens is little
            for what, run in contenders(folder, device, quick):
                run(prompts, new_tokens)
                seconds = [timed(run, prompts, new_tokens) for _ in range(1 if quick else 3)]
                prefill = min(timed(run, prompts, 1) for _ in range(1 if quick else 3))
                rate = batch * (new_tokens - 1) / max(1e-9, min(seconds) - prefill)
                share = f"{rate / bound:.0%} of the roofline"
                detail = f"{share}; prefill of {128 * batch} tokens {prefill * 1e3:.0f} ms"
                rows.append((f"decode {batch}: {what}", f"{rate:.0f} tok/s", detail))
                del run
                if device == "cuda":
                    torch.cuda.empty_cache()
    return rows


def contenders(folder: Path, device: str, quick: bool) -> Any:
    """One after the other, so that each has the GPU's memory to itself."""
    from runnerctl import LLM, SamplingParams

    settings = [("v1", 16, False), ("v2", 16, False), ("v2", 16, True)]
    if not quick:
        settings.insert(2, ("v2", 256, False))
    for runner, block_size, eager in settings:
        with LLM(
            folder,
            runner=runner,
            dtype="bfloat16",
            block_size=block_size,
            enforce_eager=eager or quick,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**28 if quick else 8 * 2**30,
        ) as llm:

            def run(prompts: list[list[int]], new_tokens: int, llm: Any = llm) -> None:
                params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
                llm.generate(prompts, params)

            backend = llm.stats().attention_backend
            how = "eager, " if eager and runner == "v2" else ""
            yield f"{runner} ({how}{backend}, blocks of {block_size})", run
    yield "transformers generate", transformers_generate(folder, device)


def transformers_generate(folder: Path, device: str) -> Callable[[list[list[int]], int], None]:
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

    return run


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
    """A section's rows; or the end of its traceback, so that the others go on."""
    started = time.perf_counter()
    try:
        rows = SECTIONS[name](device, quick)
    except Exception:
        last = traceback.format_exc().strip().splitlines()[-4:]
        rows = [(name, "FAILED", last[-1])] + [("", "", line.strip()) for line in last[:-1]]
    return [*rows, (f"({name})", f"{time.perf_counter() - started:.0f} s", "")]


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
    if args.wheels:
        find = ["--no-index", "--find-links", str(args.wheels)]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", *find, "flash-attn-4"], check=False
        )
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    rows: list[Row] = []
    for name in args.sections.split(","):
        rows += run_section(name, args.device, args.quick)
        print(f"{name} done", file=sys.stderr, flush=True)
    print(show(rows))
    if out := os.environ.get("OUT"):
        (Path(out) / "gpu_check.json").write_text(json.dumps(rows, indent=2))
    return int(any(verdict == "FAILED" for _, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
