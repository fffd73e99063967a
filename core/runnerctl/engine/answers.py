"""All answers to one prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runnerctl.engine.live_request import LiveRequest
from runnerctl.engine.outputs import RequestOutput, StreamDelta
from runnerctl.engine.prompts import Prompt
from runnerctl.engine.tokenizer import Tokenizer, as_logprobs


class PromptAnswers:
    """The live requests of one prompt, as its caller sees them.

    Attributes:
        request_id: what the caller knows the prompt by.
        entries: one per answer; the first also carries the log-probabilities of the prompt.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        entries: Sequence[LiveRequest],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.entries = entries
        self._prompt = prompt
        self._tokenizer = tokenizer

    @property
    def finished(self) -> bool:
        """No more tokens will come."""
        return all(entry.finished for entry in self.entries)

    def take_deltas(self) -> Iterator[StreamDelta]:
        """What has come since the last call."""
        for entry in self.entries:
            yield from entry.take_deltas()

    def drop_deltas(self) -> None:
        """Let go of what nobody reads; it would pile up."""
        for _ in self.take_deltas():
            pass

    def output(self) -> RequestOutput:
        """Everything so far."""
        first = self.entries[0].request
        prompt_logprobs = None
        if first.sampling_params.prompt_logprobs is not None:
            # nothing comes before the first token, so nothing can be said of it
            known = (as_logprobs(entry, self._tokenizer) for entry in first.prompt_logprobs)
            prompt_logprobs = (None, *known)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=tuple(entry.completion() for entry in self.entries),
            num_cached_tokens=first.num_cached_tokens or 0,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
        )
