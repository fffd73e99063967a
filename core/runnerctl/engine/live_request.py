"""A request while it lives: engine state on one side, text on the other."""

from __future__ import annotations

import time
from collections.abc import Iterator

from runnerctl.engine.detokenizer import IncrementalDetokenizer
from runnerctl.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from runnerctl.engine.prompts import Prompt
from runnerctl.engine.request import Request


class LiveRequest:
    """Turns a request's tokens into text and deltas.

    Args:
        index: its place among the prompts of the call.
        prompt: as given.
        request: the engine's side.
        detokenizer: None if the model has no tokenizer; the text is "" then.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        request: Request,
        detokenizer: IncrementalDetokenizer | None,
    ) -> None:
        self.request = request
        self.time_to_first_token_s = 0.0
        self._admitted_at = time.perf_counter()
        self._index = index
        self._prompt = prompt
        self._detokenizer = detokenizer
        self._deltas: list[StreamDelta] = []

    @property
    def finished(self) -> bool:
        """No more tokens will come."""
        return self.request.finish_reason is not None

    def take_token(self) -> None:
        """Take in the token that the engine just appended; may find a stop string.

        `finish_reason` is then set although the engine has not finished the request.
        A stop string wins over a `max_tokens` reached by the same token.
        """
        request = self.request
        if request.num_tokens == request.num_prompt_tokens + 1:
            self.time_to_first_token_s = time.perf_counter() - self._admitted_at
        text = ""
        if self._detokenizer is not None:
            text = self._text(self._detokenizer, request.token_ids[-1])
        self._deltas.append(
            StreamDelta(
                request.request_id,
                self._index,
                text,
                (request.token_ids[-1],),
                request.finish_reason,
            )
        )

    def take_deltas(self) -> Iterator[StreamDelta]:
        """What has come since the last call."""
        deltas, self._deltas = self._deltas, []
        yield from deltas

    def output(self) -> RequestOutput:
        """Everything so far."""
        request = self.request
        completion = CompletionOutput(
            index=0,
            text=self._detokenizer.text if self._detokenizer else "",
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=(completion,),
            num_cached_tokens=request.num_cached_tokens or 0,
            finished=self.finished,
        )

    def _text(self, detokenizer: IncrementalDetokenizer, token_id: int) -> str:
        """The text that became certain with this token."""
        request = self.request
        # A stop token ends the text and is not part of it.
        text = "" if request.finish_reason == "stop" else detokenizer.add([token_id])
        if self.finished:
            text += detokenizer.finish()
        if detokenizer.stop_reason is not None:
            request.finish_reason, request.stop_reason = "stop", detokenizer.stop_reason
        return text
