"""Models with recurrent layers: those who decode together, everybody else alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from runnerctl.runner.paged_loading import LoadedPagedModel
from runnerctl.runner.protocol import KVCacheSpec
from runnerctl.runner.recurrent_model import RecurrentModel
from runnerctl.runner.recurrent_state import StatePool

from .packed import attention_batch
from .serving import ModelStep


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one request.

    Attributes:
        request: its index in the step.
        start, end: among the step's tokens.
    """

    request: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens of a step that share a forward.

    Attributes:
        step: their part of it. Its `logits_rows` count the group's own tokens.
        places: [num_logits of the group], int64; where their logits go in the step's.
        slots: of the requests' recurrent state.
        is_first: it is one request that has no state yet. Otherwise they have some, and are
            either several with one token each or one with a further piece of its prompt.
    """

    step: ModelStep
    places: npt.NDArray[np.int64]
    slots: list[int]
    is_first: bool


class RecurrentServing:
    """See the module's docstring, and `Serving`.

    Attributes:
        replays_answers: a request that comes back after a preemption is run as it was
            before, its answer token by token, as the model's two ways to compute the state
            do not agree. Until `rehearsal` says otherwise, this is off.
    """

    carries_chunks: bool

    def __init__(self, loaded: LoadedPagedModel, block_size: int) -> None:
        assert isinstance(loaded.model, RecurrentModel)
        self.facts = replace(loaded.facts, can_share_prefixes=False)
        self.carries_chunks = True
        self.replays_answers = False
        self._model: RecurrentModel = loaded.model
        self._loaded = loaded
        self._block_size = block_size
        self._pool: StatePool | None = None

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Serving.kv_cache_spec`."""
        spec = self._loaded.kv_cache_spec()
        return replace(spec, state_bytes_per_request=self._model.state_bytes)

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        """See `Serving.allocate`."""
        if self._loaded.backend is not None:
            self._model.allocate_cache(self._loaded.backend, num_blocks, self._block_size)
        self._pool = self._model.new_pool(max_num_seqs)

    def forward(self, step: ModelStep) -> torch.Tensor:
        """See `Serving.forward`."""
        logits: torch.Tensor | None = None
        for group in self._groups(step):
            made = self._run(group)
            if logits is None:
                logits = made.new_empty(len(step.logits_rows), made.shape[1])
            logits[torch.from_numpy(group.places)] = made[: len(group.places)]
        assert logits is not None, "a step without requests"
        return logits

    def forget(self, request_id: str) -> None:
        """See `Serving.forget`."""
        if self._pool is not None:
            self._pool.release(request_id)

    def close(self) -> None:
        """See `Serving.close`."""
        self._pool = None
        self._model.close()

    def _groups(self, step: ModelStep) -> Iterator[Group]:
        assert self._pool is not None
        bounds = step.query_start_loc
        parts = [Part(i, *bounds[i : i + 2].tolist()) for i in range(len(step.request_ids))]
        slots = [self._pool.slot(request_id) for request_id in step.request_ids]
        decoding = [p for p in parts if p.end - p.start == 1 and step.positions[p.start] > 0]
        if decoding:
            # By slot: those in use lie together, so that the group's state is mostly a view.
            decoding.sort(key=lambda part: slots[part.request])
            yield _group(step, decoding, [slots[part.request] for part in decoding])
        for part in parts:
            if part not in decoding:
                for piece in self._pieces(step, part):
                    yield _group(step, [piece], [slots[part.request]])

    def _pieces(self, step: ModelStep, part: Part) -> Iterator[Part]:
        """The tokens of a request in as many forwards as they need: mostly one."""
        start = part.start
        if self.replays_answers:
            in_prompt = step.num_prompt_tokens[part.request] - int(step.positions[start])
            end = min(part.end, start + max(in_prompt, 1))
            while end < part.end:
                yield Part(part.request, start, end)
                start, end = end, end + 1
        yield Part(part.request, start, part.end)

    def _run(self, group: Group) -> torch.Tensor:
        """[num_logits of the group, at least 1, vocab_size]."""
        assert self._pool is not None
        model, step, device = self._model, group.step, self._model.device
        cache = self._pool.fresh() if group.is_first else self._pool.load(group.slots)
        paged = None
        if self._loaded.backend is not None:
            batch = attention_batch(step, device)
            paged = (self._loaded.backend.prepare(batch), batch.slot_mapping)
        shape = (len(group.slots), -1)
        tokens = (
            torch.from_numpy(step.token_ids).to(device).view(shape),
            torch.from_numpy(step.positions).to(device).view(shape),
        )
        # Not none at all: a head need not bear that.
        rows = step.logits_rows if len(step.logits_rows) else np.zeros(1, np.int64)
        logits = model.forward_rows(tokens, torch.from_numpy(rows).to(device), cache, paged)
        self._pool.store(cache, group.slots)
        return logits


def _group(step: ModelStep, parts: Sequence[Part], slots: list[int]) -> Group:
    """Some tokens of a step, in the order of `parts`."""
    tokens = np.concatenate([np.arange(part.start, part.end) for part in parts])
    lengths = [part.end - part.start for part in parts]
    members = [part.request for part in parts]
    local = np.full(step.num_tokens, -1, np.int64)
    local[tokens] = np.arange(len(tokens))
    rows = local[step.logits_rows]
    of_group = ModelStep(
        request_ids=[step.request_ids[i] for i in members],
        num_prompt_tokens=[step.num_prompt_tokens[i] for i in members],
        token_ids=step.token_ids[tokens],
        positions=step.positions[tokens],
        query_start_loc=np.cumsum([0, *lengths], dtype=np.int32),
        seq_lens=np.array([step.positions[part.end - 1] + 1 for part in parts], np.int32),
        block_table=step.block_table[members],
        slot_mapping=step.slot_mapping[tokens],
        logits_rows=rows[rows >= 0],
    )
    is_first = bool(step.positions[parts[0].start] == 0)
    return Group(of_group, np.flatnonzero(rows >= 0), slots, is_first)
