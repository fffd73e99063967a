"""Text from tokens as they come, and the strings that end it.

`tokenizers.decoders.DecodeStream` would do for byte-level vocabularies; on ones with
byte fallback (`<0xE2>`) it raises when the bytes are no valid UTF-8, which a model
may well sample. So the text is taken from the tokenizer's own `decode` of a short window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What detokenising needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of all these tokens together."""
        ...

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token stands for one byte, to be joined with its neighbours."""
        ...


class IncrementalDetokenizer:
    """The text of one request, delivered in pieces that never have to be taken back.

    The pieces together equal `tokenizer.decode` of all tokens, cut before the
    earliest stop string in it. That does not depend on how tokens divide the text.

    Args:
        tokenizer: see `Decoder`.
        skip_special_tokens: leave special tokens out of the text.
        stop: strings that end the text; not part of it.

    Attributes:
        text: all that was delivered so far.
        stop_reason: the stop string that was found, or None.
    """

    def __init__(
        self, tokenizer: Decoder, skip_special_tokens: bool = True, stop: tuple[str, ...] = ()
    ) -> None:
        self.text = ""
        self._window = _DecodeWindow(tokenizer, skip_special_tokens)
        self._stop = _StopStrings(stop)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found, or None."""
        return self._stop.found

    def add(self, token_ids: Sequence[int], *, may_stop: bool = True) -> str:
        """The text that became certain by these tokens; "" after a stop string.

        Without `may_stop` the text is not looked through for stop strings, nor is it later.

        Held back are characters with bytes to come, and an end that could still become
        a stop string.
        """
        new = "".join(self._window.add(token) for token in token_ids)
        if not may_stop:
            self.text += new
            return new
        return self._deliver(new, last=False)

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        return self._deliver(self._window.finish(), last=True)

    def _deliver(self, new: str, *, last: bool) -> str:
        certain = self._stop.pass_on(new, last=last)
        self.text += certain
        return certain


class _DecodeWindow:
    """Decodes the last few tokens together, as far as they are certain.

    The window starts with tokens already delivered, since a decoder may treat the
    first token of a text differently (no leading space).
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._delivered = 0  # tokens of the window whose text is out
        self._delivered_text = ""

    def add(self, token_id: int) -> str:
        if self._is_skipped(token_id):
            return ""
        self._token_ids.append(token_id)
        # The decoder reads a run of byte tokens as one, so a byte that spoils it changes
        # the text of those before it: wait for the end of the run.
        if self._tokenizer.is_byte_fallback(token_id):
            return ""
        text = self._decode(self._token_ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._delivered_text):
            return ""
        new = text[len(self._delivered_text) :]
        del self._token_ids[: self._delivered]
        self._delivered = len(self._token_ids)
        self._delivered_text = self._decode(self._token_ids)
        return new

    def finish(self) -> str:
        new = self._decode(self._token_ids)[len(self._delivered_text) :]
        self._delivered = len(self._token_ids)
        self._delivered_text += new
        return new

    def _is_skipped(self, token_id: int) -> bool:
        """Whether the decoder never sees the token; one that is a mere space may be empty too."""
        if not self._skip_special_tokens or self._decode([token_id]):
            return False
        return bool(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class _StopStrings:
    """Passes text on up to the earliest stop string, holding back what may become one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        # Of two that begin at the same place the shorter is complete first.
        self._stop = sorted(stop, key=len)
        self._held = ""
        self.found: str | None = None

    def pass_on(self, new: str, *, last: bool) -> str:
        if self.found is not None:
            return ""
        text = self._held + new
        self._held = ""
        if not self._stop:
            return text
        open_at = len(text) if last else self._earliest_beginning(text)
        hits = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        at, stop = min(hits, key=lambda hit: hit[0], default=(len(text), None))
        if stop is not None and at <= open_at:
            self.found = stop
            return text[:at]
        self._held = text[open_at:]
        return text[:open_at]

    def _earliest_beginning(self, text: str) -> int:
        """Where the first stop string begins that runs over the end of `text`."""
        longest = len(self._stop[-1])
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stop):
                return start
        return len(text)
