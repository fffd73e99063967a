"""A runner that claims pooling: a text's embedding is the reference's, whatever is beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runnerctl.testing.parity import make_prompts
from runnerctl.testing.runner_under_test import RunnerUnderTest

LENGTHS = (1, 3, 24, 4, 5, 8, 17, 24)
# holds the longest text, and not all of them
SMALL_BUDGET = 25
TOLERANCE = 1e-4


class PoolingContract(RunnerUnderTest):
    """Part of `RunnerConformance`: through `LLM.embed`, on a tiny encoder."""

    def test_what_it_embeds_does_not_depend_on_the_batch(
        self, tiny_models: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """Alone, together, and in small steps: the mean over the reference's hidden states."""
        if "pooling" not in self.spec.capabilities:
            pytest.skip("the spec does not claim pooling")
        from runnerctl.engine.llm import LLM

        folder = _with_pooling_file(tiny_models("bert"), tmp_path / "bert")
        prompts = make_prompts(LENGTHS)
        expected = [_reference(folder, prompt) for prompt in prompts]
        with LLM.from_resolved(self._resolved(folder)) as llm:
            for i, prompt in enumerate(prompts):
                [output] = llm.embed([prompt])
                _check(output.embedding, expected[i], f"text {i}, alone")
            for i, output in enumerate(llm.embed(prompts)):
                _check(output.embedding, expected[i], f"text {i}, in a batch")
        small = self._resolved(folder, max_num_batched_tokens=SMALL_BUDGET, max_num_seqs=3)
        with LLM.from_resolved(small) as llm:
            for i, output in enumerate(llm.embed(prompts)):
                _check(output.embedding, expected[i], f"text {i}, in small steps")
            assert not llm._running_engine().has_unfinished_requests


def _with_pooling_file(model: Path, folder: Path) -> Path:
    """A copy of a model that says how it pools."""
    shutil.copytree(model, folder)
    (folder / "1_Pooling").mkdir()
    content = json.dumps({"pooling_mode_mean_tokens": True})
    (folder / "1_Pooling" / "config.json").write_text(content, encoding="utf-8")
    return folder


def _reference(folder: Path, prompt: list[int]) -> list[float]:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([prompt])).last_hidden_state
    mean: list[float] = hidden[0].mean(dim=0).tolist()
    return mean


def _check(said: list[float], expected: list[float], what: str) -> None:
    assert len(said) == len(expected), f"{what}: {len(said)} numbers, not {len(expected)}"
    apart = max(abs(a - b) for a, b in zip(said, expected, strict=True))
    scale = max(map(abs, expected))
    assert apart <= TOLERANCE * scale, f"{what}: {apart:.2g} from the reference's embedding"
