"""`ReferenceRunner`: every step computes every scheduled sequence from its first token on.

It keeps the tokens of each request and nothing else, so there is no cache that could be
wrong: block ids and computed counts of a plan tell it only when a prompt is complete.
"""

from dataclasses import dataclass

import torch

from runnerctl.models.checkpoint import read_config
from runnerctl.runner.memory import default_device
from runnerctl.runner.model_loader import load_model, resolve_dtype
from runnerctl.runner.protocol import KVCacheSpec, LoadedModel
from runnerctl.runner.step import FinishedStep, StepResult

from .sampling import next_token, prompt_logprobs


@dataclass
class Sequence:
    """One request: its sampling parameters, its tokens so far, and how many were reported."""

    params: object
    stop_token_ids: frozenset
    num_prompt_tokens: int
    token_ids: list


class ReferenceRunner:
    """See `runnerctl.runner.protocol.ModelRunner`: these are its methods, in its order."""

    def __init__(self, context):
        self._context = context
        self._device = default_device()
        self._model = None
        self._sequences = {}

    def load(self):
        path, settings = self._context.model_path, self._context.config.model
        dtype = resolve_dtype(settings.dtype, read_config(path), self._device)
        self._model = load_model(
            path,
            dtype=dtype,
            device=self._device,
            trust_remote_code=settings.trust_remote_code,
            attn_implementation="sdpa",
        )
        config = self._model.config.get_text_config(decoder=True)
        return LoadedModel(
            vocab_size=config.vocab_size,
            max_model_len=getattr(config, "max_position_embeddings", None),
            dtype=str(dtype).removeprefix("torch."),
        )

    def kv_cache_spec(self):
        # Without a layer a block costs nothing, and the scheduler gets as many as it can use.
        return KVCacheSpec(layers=(), available_bytes=2**30)

    def initialize_kv_cache(self, num_blocks, max_model_len):
        pass

    def warm_up(self):
        self._logits([0])

    def execute(self, plan):
        # An error of the step belongs to its handle: the engine meets it in result().
        try:
            return FinishedStep(self._step(plan))
        except Exception as error:
            return FinishedStep(error)

    def shutdown(self):
        self._model = None
        self._sequences.clear()

    def _step(self, plan):
        for request_id in plan.finished_request_ids:
            self._sequences.pop(request_id, None)
        num_computed = {r.request_id: r.num_computed_tokens for r in plan.cached_requests}
        for new in plan.new_requests:
            num_computed[new.request_id] = new.num_computed_tokens
            self._sequences[new.request_id] = Sequence(
                new.sampling_params,
                new.stop_token_ids,
                new.num_prompt_tokens,
                list(new.prefill_token_ids),
            )
        # Of preempted requests the tokens are kept, and a resumed one needs only those.
        tokens, logprobs, of_prompts = {}, {}, {}
        for request_id, count in plan.num_scheduled_tokens.items():
            sequence, start = self._sequences[request_id], num_computed[request_id]
            end = start + count
            is_complete = end == len(sequence.token_ids)
            wants_prompt = sequence.params.prompt_logprobs is not None
            if not (is_complete or wants_prompt):
                continue  # a chunk of a prompt: nothing can be said before its last one
            logits = self._logits(sequence.token_ids[:end])
            if wants_prompt and start < sequence.num_prompt_tokens - 1:
                of_prompts[request_id] = prompt_logprobs(logits, sequence, start, end)
            if is_complete:
                token, entry = next_token(logits[-1:], sequence)
                sequence.token_ids.append(token)
                tokens[request_id] = token
                if entry is not None:
                    logprobs[request_id] = entry
        return StepResult(plan.step_id, tokens, logprobs, of_prompts)

    @torch.inference_mode()
    def _logits(self, token_ids):
        """[len(token_ids), vocab_size]: what comes after each of the tokens."""
        input_ids = torch.tensor([token_ids], device=self._device)
        return self._model(input_ids=input_ids, use_cache=False).logits[0]
