"""Break a text that comes in pieces between its words, where a terminal would break anywhere."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len


class WordWrap:
    """Hands a text on with line breaks put in, holding back no more than one word.

    Args:
        columns: the width of the window, asked anew for each word.

    Characters that fill two columns (Chinese, emoji) may be broken between, as such text
    has no blanks.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._word = ""

    def add(self, text: str) -> str:
        """What can be shown now."""
        shown = ""
        for character in text:
            if character.isspace():
                shown += self.flush() + self._blank(character)
            elif cell_len(character) > 1:
                shown += self.flush()
                self._word = character
            else:
                # what takes no column, such as an accent, stays with what it belongs to
                self._word += character
        return shown

    def flush(self) -> str:
        """The word that is held back."""
        word, self._word = self._word, ""
        width = cell_len(word)
        breaks = self._column > 0 and self._column + width > self._columns()
        self._column = width + (0 if breaks else self._column)
        if self._column > self._columns():  # a word longer than a line; the terminal breaks it
            self._column %= self._columns()
        return "\n" * breaks + word

    def _blank(self, character: str) -> str:
        if character == "\n":
            self._column = 0
            return character
        if character == "\t":
            self._column += 8 - self._column % 8
        else:
            self._column += 1
        # a blank at the edge would go to the next line
        return character if self._column <= self._columns() else ""
