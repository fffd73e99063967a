"""Two short requests, run as they will be served, and as transformers would generate.

Whether an architecture's recurrent layers take up state in the middle of a prompt is written
nowhere, nor whether they compute the same state from many tokens at once as one by one; and
what is not so gives wrong answers without a word. So it is tried at load, with the weights
that will serve.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from runnerctl.errors import CannotBePagedError
from runnerctl.runner.attention.interface import cannot_be_paged
from runnerctl.runner.recurrent_model import RecurrentModel

from .own_cache import OwnCacheServing
from .recurrent import RecurrentServing
from .serving import ModelStep

# Relative distance of logits. Rounding is well below, state that was dropped well above.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_TOLERANCE_OF_HALVES = 0.05

_LENGTHS = (7, 4)


@torch.inference_mode()
def rehearse(serving: RecurrentServing, model: RecurrentModel, block_size: int) -> None:
    """Find out what the model's recurrent layers bear, and set it on `serving`.

    Raises:
        CannotBePagedError: the answers would be wrong whatever is done.
    """
    prompts = _prompts(model.vocab_size)
    right = _on_own_cache(serving, model, prompts)
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_OF_HALVES)

    def distance(pieces: Sequence[Sequence[int]]) -> float:
        said = _served(serving, prompts, pieces, block_size)
        return max(float((a - b).norm() / b.norm()) for a, b in zip(said, right, strict=True))

    try:
        # As `generate` does it: the prompt, then its answer token by token.
        far = distance([(6, 1), (3, 1)])
    except Exception as error:  # of the model's own code, given what it does not expect
        raise _goes_wrong(model, f"{type(error).__name__}: {error}") from error
    if not far < tolerance:
        raise _goes_wrong(model, f"its logits are off by {far:.1%}")
    serving.replays_answers = not distance([(7,), (4,)]) < tolerance
    try:
        pieces_are_right = distance([(3, 3, 1), (3, 1)]) < tolerance
    except Exception:  # as above, and whole prompts are right
        pieces_are_right = False
    # A last piece may be a single token, which is computed like an answer.
    serving.carries_chunks = pieces_are_right and not serving.replays_answers


def _goes_wrong(model: RecurrentModel, why: str) -> CannotBePagedError:
    return cannot_be_paged(
        f"{model.architecture} does not go on rightly from its recurrent state ({why})"
    )


def _prompts(vocab_size: int) -> list[npt.NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length) for length in _LENGTHS]


def _on_own_cache(
    serving: RecurrentServing, model: RecurrentModel, prompts: Sequence[npt.NDArray[np.int64]]
) -> list[torch.Tensor]:
    """Logits after each prompt, [vocab_size], float32, as `generate` has them: the prompt whole,
    then its last token, with transformers' cache."""
    logits = []
    with model.on_own_cache() as own:
        reference = OwnCacheServing(own, serving.facts)
        for number, prompt in enumerate(prompts):
            for start, end in ((0, len(prompt) - 1), (len(prompt) - 1, len(prompt))):
                positions = np.arange(start, end)
                step = ModelStep(
                    request_ids=[str(number)],
                    num_prompt_tokens=[len(prompt)],
                    token_ids=prompt[positions],
                    positions=positions,
                    query_start_loc=np.array([0, end - start], np.int32),
                    seq_lens=np.array([end], np.int32),
                    block_table=np.zeros((1, 1), np.int32),
                    slot_mapping=positions,
                    logits_rows=np.array([end - start - 1]),
                )
                made = reference.forward(step)
            logits.append(made[0].float())
    return logits


def _served(
    serving: RecurrentServing,
    prompts: Sequence[npt.NDArray[np.int64]],
    pieces: Sequence[Sequence[int]],
    block_size: int,
) -> list[torch.Tensor]:
    """As `_on_own_cache`, in pieces of so many tokens; the last one of all prompts in one step."""
    blocks_each = -(-max(_LENGTHS) // block_size)
    serving.allocate(blocks_each * len(prompts), len(prompts))
    names = [str(i) for i in range(len(prompts))]
    done = [0] * len(prompts)
    steps = [([i], [count]) for i, counts in enumerate(pieces) for count in counts[:-1]]
    steps.append((list(range(len(prompts))), [counts[-1] for counts in pieces]))
    logits = torch.empty(0)
    for who, counts in steps:
        parts = [np.arange(done[i], done[i] + n) for i, n in zip(who, counts, strict=True)]
        bounds = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        tables = np.array([np.arange(blocks_each) + i * blocks_each for i in who], np.int32)
        slots = [
            t[part // block_size] * block_size + part % block_size
            for t, part in zip(tables.astype(np.int64), parts, strict=True)
        ]
        step = ModelStep(
            request_ids=[names[i] for i in who],
            num_prompt_tokens=[len(prompts[i]) for i in who],
            token_ids=np.concatenate(
                [prompts[i][part] for i, part in zip(who, parts, strict=True)]
            ),
            positions=np.concatenate(parts),
            query_start_loc=bounds.astype(np.int32),
            seq_lens=np.array([part[-1] + 1 for part in parts], np.int32),
            block_table=tables,
            slot_mapping=np.concatenate(slots),
            logits_rows=bounds[1:] - 1,
        )
        logits = serving.forward(step)
        for i, part in zip(who, parts, strict=True):
            done[i] += len(part)
    for name in names:
        serving.forget(name)
    return list(logits.float())
