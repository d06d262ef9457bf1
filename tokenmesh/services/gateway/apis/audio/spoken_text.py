"""SpokenText: what was said, of an answer in which a model says more than that.

Qwen3-ASR names the language before a marker; GLM-ASR and Audio Flamingo may quote the transcript in
a sentence. Text is held back until it is known what it is.
"""

import unicodedata
from dataclasses import dataclass
from typing import Final

from tokenmesh.shared.messages.audio import SpeechFacts

_LANGUAGE: Final = "language "
_MAX_HEAD_CHARS: Final = 64
"""It bounds the characters of what stands before a marker. A longer text is a transcript."""
_FRAMES: Final = (
    "The spoken content of the audio is",
    "The transcription of the audio is",
    "The content of the input audio is",
)
"""It holds what transformers' processors strip of answers, with the quotes behind it."""
_QUOTES: Final = "'\""
_END_CHARS: Final = 3
"""This is the number of characters of a quoted transcript, held back: a quote, a full stop, and
white space."""


@dataclass(slots=True)
class SpokenText:
    """The spoken text of one answer, which arrives in deltas."""

    facts: SpeechFacts
    language: str | None = None
    """Code of the language that the model names; None: none, or not one of its languages."""
    _held: str = ""
    _is_open: bool = False
    """It tells whether the transcript has begun."""
    _is_framed: bool = False
    _quote: str = ""

    def push(self, delta: str) -> str:
        """Return what is certainly said by now, beyond what was returned before."""
        if not (self.facts.marker or self.facts.is_framed):
            return delta
        self._held += delta
        if not self._is_open and not self._open():
            return ""
        keep = _END_CHARS if self._is_framed else 0
        end = max(0, len(self._held) - keep)
        said, self._held = self._held[:end], self._held[end:]
        return said

    def finish(self) -> str:
        """Return what is left when the answer has ended."""
        if not self._is_open:
            self._open(is_whole=True)
        rest, self._held = self._held, ""
        if not self._is_framed:
            return rest
        rest = rest.rstrip().removesuffix(".").rstrip()
        return rest.removesuffix(self._quote) if self._quote else rest

    def _open(self, *, is_whole: bool = False) -> bool:
        """Return whether the transcript begins; what is held begins with it then."""
        text = self._held.lstrip()
        if self.facts.marker:
            self._is_open = self._after_marker(text, is_whole)
        else:
            self._is_open = self._after_frame(text, is_whole)
        return self._is_open

    def _after_marker(self, text: str, is_whole: bool) -> bool:
        head, marker, rest = text.partition(self.facts.marker)
        if marker:
            name = head.strip().lower().removeprefix(_LANGUAGE).strip()
            codes = {name.lower(): code for code, name in self.facts.language_names.items()}
            self.language = codes.get(name)
            self._held = rest
            return True
        is_head = _LANGUAGE.startswith(text[: len(_LANGUAGE)].lower())
        return is_whole or not (is_head and len(text) < _MAX_HEAD_CHARS)

    def _after_frame(self, text: str, is_whole: bool) -> bool:
        for frame in _FRAMES:
            if frame.startswith(text) and not is_whole:
                return False
            if text.startswith(frame):
                rest = text[len(frame) :].lstrip(": ")
                if not rest and not is_whole:
                    return False
                self._is_framed = True
                self._quote = rest[:1] if rest[:1] in _QUOTES and rest else ""
                self._held = rest[len(self._quote) :]
                return True
        return True


def spoken(text: str, facts: SpeechFacts) -> str:
    """Return what was said, of a whole answer."""
    said = SpokenText(facts)
    return said.push(text) + said.finish()


def gap_between(before: str, after: str) -> str:
    """Return what stands between the texts of two clips: a space, if the script has spaces."""
    if not before or not after or before[-1].isspace() or after[0].isspace():
        return ""
    return "" if _is_unspaced(before[-1]) and _is_unspaced(after[0]) else " "


def _is_unspaced(char: str) -> bool:
    """Return whether a character is of a script without spaces between words; Korean has them."""
    name = unicodedata.name(char, "").split(" ")[0]
    if name in ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "FULLWIDTH"):
        return True
    return name in ("THAI", "LAO", "KHMER", "MYANMAR")
