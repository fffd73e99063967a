"""A sequence while it lives: engine state on one side, text on the other."""

from __future__ import annotations

import time
from collections.abc import Iterator

from runnerctl.engine.detokenizer import IncrementalDetokenizer
from runnerctl.engine.outputs import CompletionOutput, Logprobs, StreamDelta
from runnerctl.engine.request import Request
from runnerctl.engine.tokenizer import Tokenizer, as_logprobs


class LiveRequest:
    """Turns a sequence's tokens into text, log-probabilities and deltas.

    Args:
        prompt_index: which of the call's prompts it answers.
        output_index: which of that prompt's answers it is.
        request: the engine's side.
        tokenizer: None if the model has none; the text is "" then.

    Attributes:
        counted: its end is in the counts and the journal.
        followers: further answers to the same prompt. They are queued once this one has a
            token: by then the prompt is in the prefix cache, and computed only once.
        time_to_first_token_s: seconds from admission; None before there is one.
    """

    def __init__(
        self, prompt_index: int, output_index: int, request: Request, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.followers: list[LiveRequest] = []
        self.counted = False
        self.time_to_first_token_s: float | None = None
        self._admitted_at = time.perf_counter()
        self._prompt_index, self._output_index = prompt_index, output_index
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            params = request.sampling_params
            self._detokenizer = tokenizer.stream(
                skip_special_tokens=params.skip_special_tokens, stop=params.stop
            )
        self._deltas: list[StreamDelta] = []
        self._logprobs: list[Logprobs] = []
        self._ended = False

    @property
    def finished(self) -> bool:
        """No more tokens will come."""
        return self.request.finish_reason is not None

    @property
    def age_s(self) -> float:
        """Seconds since admission."""
        return time.perf_counter() - self._admitted_at

    def take_token(self) -> None:
        """Take in the token that the engine just appended; may find a stop string.

        `finish_reason` is then set although the engine has not finished the request.
        A stop string wins over a `max_tokens` reached by the same token.
        """
        request, token_id = self.request, self.request.token_ids[-1]
        if request.sampling_params.logprobs is not None:
            self._logprobs.append(as_logprobs(request.logprobs[-1], self._tokenizer))
        text = self._text_of(token_id)
        self._add_delta(text, (token_id,), tuple(self._logprobs[-1:]))

    def take_abort(self) -> None:
        """Take in, once, that the request was aborted: hand out what was held back, and its end."""
        if self._ended:
            return
        self._add_delta(self._detokenizer.finish() if self._detokenizer else "", (), ())

    def take_deltas(self) -> Iterator[StreamDelta]:
        """What has come since the last call."""
        deltas, self._deltas = self._deltas, []
        yield from deltas

    def completion(self) -> CompletionOutput:
        """The answer so far."""
        request = self.request
        asked = request.sampling_params.logprobs is not None
        return CompletionOutput(
            index=self._output_index,
            text=self._detokenizer.text if self._detokenizer else "",
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=tuple(self._logprobs) if asked else None,
            cumulative_logprob=sum(e.logprob for e in request.logprobs) if asked else None,
        )

    def _add_delta(
        self, text: str, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]
    ) -> None:
        delta = StreamDelta(
            request_id=self.request.request_id,
            index=self._prompt_index,
            text=text,
            token_ids=token_ids,
            finish_reason=self.request.finish_reason,
            output_index=self._output_index,
            logprobs=logprobs,
        )
        self._deltas.append(delta)
        self._ended = self.finished

    def _text_of(self, token_id: int) -> str:
        """The text that became certain with this token."""
        detokenizer, request = self._detokenizer, self.request
        if detokenizer is None:
            return ""
        text = ""
        if request.finish_reason != "stop":  # a stop token is not part of the text
            armed = len(request.output_token_ids) > request.sampling_params.min_tokens
            text = detokenizer.add([token_id], may_stop=armed)
        if self.finished:
            text += detokenizer.finish()
        if detokenizer.stop_reason is not None:
            request.finish_reason, request.stop_reason = "stop", detokenizer.stop_reason
        return text
