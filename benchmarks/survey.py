"""Every language model class that transformers knows, tried with a tiny random checkpoint.

    python benchmarks/survey.py [MODEL_TYPE ...] [--runner v1] [--json docs/data/parity.json]

Greedy tokens in float32 are compared with transformers' `generate`: requests alone, together,
in pieces of a small budget, and preempted. A model that `generate` itself cannot run from a
tiny config, or whose reference says always the same, proves nothing and is set apart.

    served    equal tokens, on the paged cache or with recurrent state
    fallback  equal tokens, each request by itself on transformers' own cache
    refused   a clear error at load
    wrong     other tokens than transformers, or an error on the way
    not run   generate cannot run it, or its answers have no variety
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tiny_configs import tiny_config

LENGTHS = (1, 3, 16, 17, 31, 45)
MAX_TOKENS = 16
NEAR_TIE = 1e-4
LEAST_VARIETY = 12
ATTEMPTS = 4
SECONDS_EACH = 240
LARGEST = 20_000_000

WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "in pieces": {"max_num_batched_tokens": 7, "max_num_seqs": 6, "block_size": 4},
    "preempted": {
        "max_num_batched_tokens": 40,
        "block_size": 4,
        "num_gpu_blocks_override": 26,
        "max_model_len": 80,
    },
}


@dataclass(frozen=True)
class Finding:
    """What came of one architecture."""

    architecture: str
    model_type: str
    status: str
    reason: str = ""


def survey(model_type: str, architecture: str, runner: str) -> Finding:
    def found(status: str, reason: object = "") -> Finding:
        text = " ".join(str(reason).split())
        return Finding(architecture, model_type, status, text[:300])

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variety = 0
        for attempt in range(ATTEMPTS):
            place = folder / str(attempt)
            try:
                make_checkpoint(model_type, place, attempt)
                references = reference(place)
            except TimeoutError:
                raise
            except Exception as error:
                return found("not run", f"generate: {type(error).__name__}: {error}")
            variety = len({token for tokens, _ in references for token in tokens})
            if variety >= LEAST_VARIETY:
                return run(place, references, runner, found)
        return found("not run", f"only {variety} different tokens")


def run(folder: Path, references: list, runner: str, found: Any) -> Finding:
    from runnerctl import LLM, SamplingParams
    from runnerctl.errors import UserError

    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    note = ""
    for way, settings in WAYS.items():
        try:
            # compiling takes longer than everything else here
            llm = LLM(folder, runner=runner, dtype="float32", enforce_eager=True, **settings)
        except UserError as error:
            # that the runner was asked for here is of no interest to readers
            return found("refused", error.message.rpartition("was asked for, but ")[2])
        except TimeoutError:
            raise
        except Exception as error:
            return found("wrong", f"at load: {type(error).__name__}: {error}")
        with llm:
            try:
                note = llm.stats().note
                if way == "together":
                    alone = [llm.generate(prompt, greedy)[0] for prompt in prompts()]
                    if said := difference(alone, references, folder):
                        return found("wrong", f"alone: {said}")
                if said := difference(llm.generate(prompts(), greedy), references, folder):
                    return found("wrong", f"{way}: {said}")
            except TimeoutError:
                raise
            except Exception as error:
                return found("wrong", f"{way}: {type(error).__name__}: {error}")
    return found("fallback" if note else "served", note)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 256) for _ in range(length)] for length in LENGTHS]


def make_checkpoint(model_type: str, folder: Path, attempt: int) -> None:
    """The further the attempt, the further apart the weights: some architectures need that."""
    import torch
    from transformers import AutoModelForCausalLM

    from runnerctl.testing.tiny_models import save_random_model

    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"the tiny config has {size:,} parameters")
    spread = 0.5 * 2**attempt
    save_random_model(AutoModelForCausalLM, config, folder, seed=attempt, spread=spread)


def reference(folder: Path) -> list[tuple[list[int], list[float]]]:
    from runnerctl.testing.tiny_models import reference_generate

    return [reference_generate(folder, prompt, MAX_TOKENS) for prompt in prompts()]


def difference(outputs: Sequence[Any], references: list, folder: Path) -> str:
    """Where tokens part from the reference, other than at a near tie; "" if nowhere."""
    for number, (output, (expected, gaps)) in enumerate(zip(outputs, references, strict=True)):
        said = list(output.outputs[0].token_ids)
        for i, (token, right) in enumerate(zip(said, expected, strict=True)):
            if token != right:
                if gaps[i] > NEAR_TIE and not is_unstable(folder, prompts()[number] + expected[:i]):
                    return f"prompt {number} parts at token {i} (gap {gaps[i]:.3f})"
                break
    return ""


def is_unstable(folder: Path, token_ids: list[int]) -> bool:
    """Whether noise of one in a million makes transformers itself say another next token.

    A router that chooses experts has near ties too, and they do not show in the logits.
    """
    import torch

    from runnerctl.testing.tiny_models import reference_model

    model = reference_model(folder)
    tokens = torch.tensor([token_ids])
    with torch.inference_mode():
        right = model(tokens).logits[0, -1].argmax()
        embedded = model.get_input_embeddings()(tokens)
        for seed in range(20):
            noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(seed))
            said = model(inputs_embeds=embedded + 1e-6 * noise).logits[0, -1].argmax()
            if said != right:
                return True
    return False


def architectures() -> list[tuple[str, str]]:
    """(model type, class name) of all that transformers maps."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [
        (model_type, names if isinstance(names, str) else names[0])
        for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    ]


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """transformers' own warnings are about other things."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--runner", default="v1")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    findings = []
    for model_type, architecture in architectures():
        if args.model_types and model_type not in args.model_types:
            continue
        started = time.perf_counter()
        try:
            with within(SECONDS_EACH), hidden():
                finding = survey(model_type, architecture, args.runner)
        except TimeoutError as error:
            finding = Finding(architecture, model_type, "not run", str(error))
        findings.append(finding)
        seconds = time.perf_counter() - started
        print(
            f"{finding.status:9} {architecture:40} {model_type:24} {seconds:5.1f} s  "
            f"{finding.reason}",
            flush=True,
        )
    print()
    counts = Counter(finding.status for finding in findings)
    tried = len(findings) - counts["not run"]
    right = counts["served"] + counts["fallback"]
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    print(f"equal tokens: {right} of {tried} that generate can run ({right / max(tried, 1):.0%})")
    if args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        for finding in findings:
            record = asdict(finding)
            known[record.pop("architecture")] = record
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
