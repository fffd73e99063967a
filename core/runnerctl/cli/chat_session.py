"""A conversation: what was said, what still fits, one answer at a time. No terminal in here."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from runnerctl.cli.sampling_flags import flags_named
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.errors import PromptError, UserError
from runnerctl.suggest import did_you_mean

if TYPE_CHECKING:
    from runnerctl.engine.llm import LLM
    from runnerctl.engine.outputs import FinishReason
    from runnerctl.engine.stats import EngineStats

HELP = """\
/system TEXT  set the system message; without TEXT, show it
/clear        forget what was said
/help         this
/exit         end, as Ctrl-D does
Ctrl-C stops an answer; what there is of it stays.
Begin with a blank to send a text that begins with /."""

Message = dict[str, str]


class StopNow(KeyboardInterrupt):
    """A second Ctrl-C, for one that is not seen because no token comes."""


class Terminal(Protocol):
    """What a session reads from and writes to.

    Attributes:
        interactive: somebody reads what is noted, and can try again.
    """

    interactive: bool

    def read(self) -> str | None:
        """The next line, or None at the end."""

    def say(self, text: str) -> None:
        """Show a piece of an answer."""

    def note(self, text: str) -> None:
        """Show a line about the conversation."""

    def interruptible(self) -> AbstractContextManager[Callable[[], bool]]:
        """While entered, Ctrl-C makes the function it gives return True.

        A second one raises `StopNow`. Where nobody is there, Ctrl-C is as ever.
        """


class ChatSession:
    """A conversation with a model.

    Args:
        llm: the model.
        params: for every answer.
        terminal: where the lines come from and the answers go.
        system: first message, above the conversation.
        stats: report tokens and times below each answer.

    Raises:
        PromptError: the model has no chat template, or does not take the system message.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        terminal: Terminal,
        *,
        system: str | None = None,
        stats: bool = False,
    ) -> None:
        self._llm, self._params, self._terminal = llm, params, terminal
        self._system, self._stats = system, stats
        self._said: list[Message] = []
        # room that is kept for an answer; a quarter at most, or long answers leave no history
        self._reserve = min(params.max_tokens, llm.max_model_len // 4)
        self._check()

    @property
    def messages(self) -> list[Message]:
        """The conversation as the model sees it."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._said]

    def run(self) -> None:
        """Take lines until there are no more, or one says that this is the end.

        Raises:
            UserError: a line cannot be answered, and nobody is there to give another.
        """
        while (line := self._terminal.read()) is not None:
            try:
                if not self.take(line):
                    return
            except UserError as exc:
                if not self._terminal.interactive:
                    raise
                self._terminal.note(f"error: {exc}")

    def take(self, line: str) -> bool:
        """Answer one line, or obey it; False if it ends the conversation.

        Raises:
            UserError: it cannot be answered, or is no command. The conversation is as before.
        """
        if line.startswith("/"):
            return self._obey(*line[1:].split(maxsplit=1))
        if line.strip():
            self._answer(line.strip())
        return True

    def _obey(self, command: str = "", text: str = "") -> bool:
        if command == "help":
            self._terminal.note(HELP)
        elif command == "clear":
            self._said = []
            self._terminal.note("(forgotten)")
        elif command == "system":
            self._set_system(text.strip())
        elif command != "exit":
            known = did_you_mean(f"/{command}", ("/help", "/clear", "/system", "/exit"))
            raise UserError(
                f"unknown command '/{command}'{known}", remedy="/help lists the commands"
            )
        return command != "exit"

    def _set_system(self, text: str) -> None:
        if not text:
            self._terminal.note(f"(system message: {self._system or 'none of yours'})")
            return
        before, self._system = self._system, text
        try:
            self._check()
        except UserError:
            self._system = before
            raise
        self._terminal.note("(system message set)")

    def _check(self) -> None:
        """Let the template see the beginning of a conversation with this system message."""
        self._prompt([*self.messages, {"role": "user", "content": "Hello"}])

    def _prompt(self, messages: list[Message]) -> list[int]:
        token_ids = self._llm.chat_prompt(messages)
        if token_ids is None:
            raise PromptError(
                "this model has no chat template, so it cannot hold a conversation",
                remedy="take an instruction-tuned model, or use runnerctl generate",
            )
        return token_ids

    def _answer(self, text: str) -> None:
        before = list(self._said)
        self._said.append({"role": "user", "content": text})
        try:
            answer = self._stream(self._fit())
        except BaseException:
            self._said = before
            raise
        if answer:
            self._said.append({"role": "assistant", "content": answer})
        else:  # many templates want questions and answers in turn
            self._said = before
            self._terminal.note("(there is no answer, so your message is forgotten)")

    def _fit(self) -> list[int]:
        """The conversation as tokens. What is oldest goes if the answer would lack room."""
        limit = self._llm.max_model_len
        dropped = 0
        while True:
            token_ids = self._prompt(self.messages)
            last = len(self._said) == 1
            if len(token_ids) + self._reserve <= limit or (last and len(token_ids) < limit):
                break
            if last:
                raise PromptError(
                    f"the message is too long: with it the conversation has {len(token_ids)} "
                    f"tokens, and the model takes {limit}",
                    remedy="shorten it, or raise --max-model-len if the model and the KV cache "
                    "allow more",
                )
            del self._said[:2]
            dropped += 1
        if dropped:
            what = "exchange was" if dropped == 1 else f"{dropped} exchanges were"
            self._terminal.note(f"(the context is full: the oldest {what} forgotten)")
        return token_ids

    def _stream(self, prompt: list[int]) -> str:
        """Show an answer as it comes; returns what there is of it."""
        text, count = "", 0
        reason: FinishReason | None = None
        before, started, first = self._llm.stats(), time.perf_counter(), 0.0
        with self._terminal.interruptible() as stopped:
            with flags_named():
                stream = self._llm.stream([{"prompt_token_ids": prompt}], self._params)
            try:
                for delta in stream:
                    first = first or time.perf_counter() - started
                    count += len(delta.token_ids)
                    if stopped():
                        reason = "abort"
                        self._llm.abort(delta.request_id)
                        continue
                    text += delta.text
                    reason = delta.finish_reason
                    self._terminal.say(delta.text)
            except StopNow:
                reason = "abort"
        if text and not text.endswith("\n"):
            self._terminal.say("\n")
        self._say_how_it_ended(reason, count)
        if self._stats:
            self._terminal.note(_stats_line(before, self._llm.stats(), len(prompt), count, first))
        return text

    def _say_how_it_ended(self, reason: FinishReason | None, count: int) -> None:
        if reason == "abort":
            self._terminal.note("(stopped)")
        elif reason == "length" and count >= self._params.max_tokens:
            self._terminal.note(f"(cut off: --max-tokens is {self._params.max_tokens})")
        elif reason == "length":
            limit = self._llm.max_model_len
            self._terminal.note(f"(cut off: the context of {limit} tokens is full)")


def _stats_line(
    before: EngineStats, after: EngineStats, prompt: int, generated: int, first: float
) -> str:
    """One answer in numbers."""
    parts = [f"{prompt} prompt tokens"]
    if generated:
        parts.append(f"{after.num_cached_tokens - before.num_cached_tokens} of them cached")
    parts.append(f"{generated} generated")
    if generated:
        parts.append(f"{first:.2f} s to the first")
    if (seconds := after.step_time_s - before.step_time_s) > 0:
        parts.append(f"{generated / seconds:.1f} tokens/s")
    return f"({', '.join(parts)})"
