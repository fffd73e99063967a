"""Random requests that meet every case of an engine with several ranks, and their right tokens.

Prompts shorter than two tokens per rank, chunks beside decodes, shared prefixes, preempted
requests, greedy and seeded ones; checked against transformers, up to near ties.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from runnerctl import LLM, SamplingParams
from runnerctl.testing.parity import assert_tokens, greedy, reference_tokens, seeded

# A cache that holds some of the requests that may run, and steps that cut most prompts.
TIGHT = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 30,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 6,
    "max_model_len": 96,
}
VOCABULARY = range(3, 250)


@dataclass(frozen=True)
class Asked:
    name: str
    prompt: list[int]
    params: SamplingParams


def random_requests(count: int, seed: int = 11) -> list[Asked]:
    rng = random.Random(seed)
    prefixes = [rng.choices(VOCABULARY, k=length) for length in (9, 22, 41)]
    asked = []
    for index in range(count):
        prefix = rng.choice([[], [], *prefixes])
        prompt = prefix + rng.choices(VOCABULARY, k=rng.choice([1, 2, 3, 4, 7, 12, 30]))
        length = rng.randint(1, 10)
        params = greedy(length) if rng.random() < 0.7 else seeded(index, length)
        asked.append(Asked(f"request {index}", prompt, params))
    return asked


def check_requests(llm: LLM, folder: Path, asked: list[Asked], *, window: int = 9) -> None:
    """Run them all, some at a time, and compare every token; see that the cases were met."""
    inputs = ((one, one.prompt, one.params) for one in asked)
    done = 0
    for one, output in llm.generate_each(inputs, window=window):
        expected = reference_tokens(folder, one.prompt, one.params)
        assert len(output.outputs[0].token_ids) == one.params.max_tokens
        assert_tokens(output.outputs[0].token_ids, expected, one.name)
        done += 1
    assert done == len(asked)
    stats = llm.stats()
    assert stats.num_cached_tokens > 0
    assert stats.num_preemptions > 0


def workers_of(llm: LLM) -> list[int]:
    """The process ids of an engine's workers, by rank."""
    ranks = llm._engine._executor._ranks
    return [worker._process.pid for worker in ranks._workers]
