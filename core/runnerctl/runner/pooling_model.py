"""A transformers model that reads whole texts, several at a time.

A text's result must not depend on the texts beside it. Most models see to that when they
are told which tokens are padding; some cannot, because they mix tokens without a mask,
look at the last column, or refuse more than one text without a padding token. Which it is
is tried at load, on a few tokens, rather than read from a list of names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from runnerctl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Together = Literal["padded", "equal lengths", "alone"]
"""Which texts may share a forward: all, those of one length, or none."""

# How far results may be apart by rounding alone, relative to the largest number.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


class PoolingModel:
    """A loaded encoder, decoder or classifier, tried out.

    Args:
        model: in eval mode. Its output has `logits` if `classifies`, else `last_hidden_state`.
        classifies: whether it has a head with a number per label.

    Raises:
        ModelError: it cannot be run on token ids alone.

    Attributes:
        vocab_size: token ids are below this.
        together: which texts may share a forward.
        is_causal: no token sees those after it. Only known of a model that does not classify.
    """

    def __init__(self, model: PreTrainedModel, *, classifies: bool) -> None:
        self._model = model
        self._classifies = classifies
        self.device = model.device
        pad = getattr(model.config.get_text_config(), "pad_token_id", None)
        self.is_causal = False
        try:
            self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
            # without one, or with one that is not there, anything that is masked does
            self._pad_token_id = pad if isinstance(pad, int) and 0 <= pad < self.vocab_size else 0
            short = _some_tokens(5, self.vocab_size, self._pad_token_id)
            alone, _ = self.forward([short])
            if not classifies:
                other, _ = self.forward([[*short[:-1], short[0]]])
                self.is_causal = _are_close(alone[0, 0], other[0, 0])
        except Exception as error:  # what a model needs besides shows in ways of its own
            raise ModelError(
                f"{type(model).__name__} cannot be run on tokens alone: {error}",
                remedy="this architecture cannot be served",
            ) from error
        self.together = self._try_together(alone, short)

    def forward(
        self, texts: Sequence[Sequence[int]], token_types: Sequence[Sequence[int]] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward over several texts, padded to the right.

        Args:
            texts: token ids of each.
            token_types: of each, where texts are pairs.

        Returns:
            [texts, longest, hidden_size], or the scores [texts, labels] of a classifier; and
            the lengths [texts], int64.
        """
        longest = max(map(len, texts))
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        steps = torch.arange(longest, device=self.device)
        inputs: dict[str, torch.Tensor] = {
            "input_ids": self._padded(texts, longest, self._pad_token_id),
            "attention_mask": (steps < lengths[:, None]).long(),
        }
        if token_types is not None:
            inputs["token_type_ids"] = self._padded(token_types, longest, 0)
        with torch.inference_mode():
            output = self._model(**inputs)
        result: torch.Tensor = output.logits if self._classifies else output.last_hidden_state
        return result, lengths

    def _padded(self, rows: Sequence[Sequence[int]], longest: int, filler: int) -> torch.Tensor:
        padded = [[*row, *[filler] * (longest - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.device)

    def _try_together(self, alone: torch.Tensor, short: list[int]) -> Together:
        """Compare a text beside others with itself alone."""
        longer = _some_tokens(9, self.vocab_size, self._pad_token_id)[::-1]
        # BigBird goes over to blocks where rows are long, which a trial of few tokens cannot see.
        is_by_blocks = getattr(self._model.config, "attention_type", "") == "block_sparse"
        if not is_by_blocks and self._is_same(lambda: self.forward([longer, short])[0][1:], alone):
            return "padded"
        if self._is_same(lambda: self.forward([longer[: len(short)], short])[0][1:], alone):
            return "equal lengths"
        return "alone"

    def _is_same(self, run: Callable[[], torch.Tensor], alone: torch.Tensor) -> bool:
        try:
            beside = run()
        except Exception:  # as above
            return False
        if not self._classifies:
            beside = beside[:, : alone.shape[1]]
        return beside.shape == alone.shape and _are_close(beside, alone)


def _some_tokens(count: int, table: int, pad: int) -> list[int]:
    """Token ids without the padding token, most of them different."""
    usable = [token for token in range(min(table, 4 * count)) if token != pad]
    return [usable[(3 * i + 2) % len(usable)] for i in range(count)]


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    scale = float(other.abs().max())
    return float((one - other).abs().max()) <= _TOLERANCE.get(one.dtype, 1e-4) * scale
