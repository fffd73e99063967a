"""One contender of `bench_peers.py`, in a process and perhaps a virtual environment of its own.

Reads a line of JSON per task from stdin, {"prompts": [[token ids]], "new_tokens": n}, and
writes one with the seconds it took to stdout. Imports nothing of runnerctl unless it is
the contender.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

Run = Callable[[list[list[int]], int], None]


def runnerctl(runner: str, model: str, dtype: str, max_len: int) -> tuple[Run, str]:
    from runnerctl import LLM, SamplingParams

    llm = LLM(model, runner=runner, dtype=dtype, max_model_len=max_len, enable_prefix_caching=False)

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        assert all(len(o.outputs[0].token_ids) == new_tokens for o in outputs)

    stats = llm.stats()
    done = "; ".join(one.report for one in stats.transforms)
    return run, f"attention {stats.attention_backend}" + (f"; {done}" if done else "")


def transformers_generate(model: str, dtype: str) -> tuple[Run, str]:
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = loaded.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        assert out.shape[1] == longest + new_tokens

    return run, f"transformers {transformers.__version__}, left-padded batch"


def transformers_continuous(model: str, dtype: str) -> tuple[Run, str]:
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation="sdpa"
    ).eval()

    # Left to itself it would take most of the memory there is for its cache, anew in each call,
    # which costs more than the work. These are 40,960 tokens, enough for the largest workload.
    batching = transformers.ContinuousBatchingConfig(
        page_size=256, num_blocks=160, max_batch_tokens=2048, allow_block_sharing=False
    )

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        options = transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        with torch.inference_mode():
            out = loaded.generate_batch(
                prompts,
                generation_config=options,
                continuous_batching_config=batching,
                progress_bar=False,
                persistent_manager=True,
            )
        assert len(out) == len(prompts)
        assert all(len(one.generated_tokens) == new_tokens for one in out.values())

    return run, f"transformers {transformers.__version__}, generate_batch"


def vllm(model: str, dtype: str, max_len: int, eager: bool) -> tuple[Run, str]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    import vllm as package

    llm = package.LLM(
        model,
        dtype=dtype,
        max_model_len=max_len,
        enable_prefix_caching=False,
        enforce_eager=eager,
        disable_log_stats=True,
    )

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        params = package.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == new_tokens for o in outputs)

    return run, f"vllm {package.__version__}, {'eager' if eager else 'compiled'}"


def make(kind: str, model: str, dtype: str, max_len: int) -> tuple[Run, str]:
    """The contender called `kind`, and a few words on how it runs."""
    if kind.startswith("runnerctl "):
        return runnerctl(kind.removeprefix("runnerctl "), model, dtype, max_len)
    if kind == "transformers generate":
        return transformers_generate(model, dtype)
    if kind == "transformers continuous":
        return transformers_continuous(model, dtype)
    if kind in ("vllm compiled", "vllm eager"):
        return vllm(model, dtype, max_len, eager=kind == "vllm eager")
    raise SystemExit(f"no contender is called {kind!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    args = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Libraries print to stdout as they like; the answers go where it pointed at first.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run, how = make(args.kind, args.model, args.dtype, args.max_model_len)
    print(json.dumps({"how": how}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        started = time.perf_counter()
        run(task["prompts"], task["new_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - started}), file=answers)
    # A peer's background threads are not to keep the process.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
