"""WordWrap: text that comes in pieces, broken between words at the width of a terminal."""

from typing import Final

from rich.cells import cell_len

_FENCE: Final = "```"


class WordWrap:
    """Holds back a word until it is complete; code between fences stays as it is."""

    def __init__(self, width: int | None) -> None:
        """`width` in columns; None: nothing is broken or held back."""
        self._width = width
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._is_code = False
        self._line_starts = True

    def feed(self, text: str) -> str:
        """What can be written once `text` has come."""
        if self._width is None:
            return text
        return "".join(map(self._take, text))

    def rest(self) -> str:
        """What is held back."""
        return self._end_word() + self._take_spaces()

    def _take(self, char: str) -> str:
        if char == "\n":
            written = self.rest() + char
            self._column, self._line_starts = 0, True
            return written
        if char.isspace():
            written = self._end_word()
            self._spaces += char
            return written
        # Scripts with wide characters are written without spaces.
        is_wide = not char.isascii() and cell_len(char) > 1
        written = self._end_word() if is_wide else ""
        self._word += char
        if is_wide or cell_len(self._word) >= (self._width or 0):
            written += self._end_word()
        return written

    def _end_word(self) -> str:
        if not self._word:
            return ""
        if self._line_starts and self._word.startswith(_FENCE):
            self._is_code = not self._is_code
        room = (self._width or 0) - self._column - cell_len(self._spaces)
        if self._column and cell_len(self._word) > room and not self._is_code:
            self._spaces, self._column = "", 0
            written = "\n"
        else:
            written = self._take_spaces()
        written += self._word
        self._column += cell_len(self._word)
        self._word, self._line_starts = "", False
        return written

    def _take_spaces(self) -> str:
        spaces, self._spaces = self._spaces, ""
        self._column += cell_len(spaces)
        return spaces
