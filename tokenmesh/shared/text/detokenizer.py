"""Incremental detokenization: ids in any portions to text that is never cut within a character.

The pieces joined are the text of all ids at once, however the ids were portioned. Only where
tokens of single bytes (`<0xE2>`) are not all of characters, the tokenizer's own text of all ids is
another one: it shows each byte of such a run as U+FFFD, however long the run is, so nothing of it
could be streamed. Here each byte outside a character is U+FFFD, as in SentencePiece.
"""

import codecs
from collections.abc import Sequence
from itertools import groupby
from typing import Final, Protocol

from tokenmesh.shared.text.vocabulary import REPLACEMENT, Vocabulary

CONTEXT_TOKENS: Final = 5
"""So many ids before the first one decide whether it starts with a space."""

_MAX_HELD: Final = 8
"""No character has more tokens than this: longer garbage is passed on as U+FFFD."""


class Detokenizer(Protocol):
    """The state of one stream."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""

    def finish(self) -> str:
        """Return what was held back, an incomplete character as U+FFFD."""


def make_detokenizer(
    vocabulary: Vocabulary,
    context_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """The right one for a vocabulary; `context_ids` are the ids just before the stream."""
    if vocabulary.is_byte_level:
        return _ByteLevel(vocabulary, skip_special_tokens)
    return _Window(
        vocabulary,
        context_ids[-CONTEXT_TOKENS:],
        skip_special_tokens,
        # As in vLLM: without special tokens there is nothing to put spaces between.
        spaces_between_special_tokens or skip_special_tokens,
    )


class _ByteLevel(Detokenizer):
    """Each token has fixed bytes: look them up and decode UTF-8."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, vocabulary: Vocabulary, skip_special: bool) -> None:
        self._pieces = vocabulary.plain_pieces if skip_special else vocabulary.pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        if len(ids) == 1:
            return self._decode(pieces[ids[0]])
        return self._decode(b"".join([pieces[token_id] for token_id in ids]))

    def finish(self) -> str:
        return self._decode(b"", True)


class _Window(Detokenizer):
    """Decodes the last few tokens again and passes on what they add.

    The window is what was passed on last (`_num_known` ids, text `_known`) and what is held.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        context_ids: Sequence[int],
        skip_special: bool,
        spaces_between: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special_ids if skip_special else frozenset()
        self._spaces_between = spaces_between
        self._is_after_added = False
        self._bytes_by_id = vocabulary.bytes_by_id
        self._cut: list[int] = []
        """Ids of the first bytes of a character."""
        self._window = [each for each in context_ids if each not in self._hidden]
        self._restart(self._window)

    def push(self, ids: Sequence[int]) -> str:
        if not self._spaces_between:
            return "".join([self._push_apart(token_id) for token_id in ids])
        return self._push([each for each in ids if each not in self._hidden])

    def finish(self) -> str:
        return self._finish_window() + self._finish_character()

    def _finish_window(self) -> str:
        if len(self._window) == self._num_known:
            return ""
        text = self._vocabulary.decode(self._window)[len(self._known) :]
        self._restart(self._window[self._num_known :])
        return text

    def _push(self, ids: Sequence[int]) -> str:
        if not self._cut and self._bytes_by_id.keys().isdisjoint(ids):
            return self._push_pieces(ids)
        parts = []
        for is_byte, run in groupby(ids, self._bytes_by_id.__contains__):
            if is_byte:
                parts.append(self._finish_window())
                parts.extend(self._push_byte(token_id) for token_id in run)
            else:
                parts += [self._finish_character(), self._push_pieces(list(run))]
        return "".join(parts)

    def _push_byte(self, token_id: int) -> str:
        self._cut.append(token_id)
        text = ""
        while self._cut:
            data = b"".join([self._bytes_by_id[each] for each in self._cut])
            try:
                char, _ = codecs.utf_8_decode(data, "strict", False)
            except UnicodeDecodeError:
                text += self._show(self._cut[:1], REPLACEMENT)
                continue
            if char:
                text += self._show(self._cut[:], char)
            break
        return text

    def _finish_character(self) -> str:
        return "".join([self._show([token_id], REPLACEMENT) for token_id in self._cut[:]])

    def _show(self, ids: list[int], char: str) -> str:
        """Pass on the text of the first of the cut character's ids."""
        del self._cut[: len(ids)]
        # A decoder may strip a space at the start of a text.
        text = char if self._window else self._vocabulary.decode(ids)
        self._restart(ids)
        return text

    def _push_pieces(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        self._window.extend(ids)
        text, num_held = self._decode_complete()
        if len(text) < len(self._known):
            return ""
        added = text[len(self._known) :]
        if added:
            end = len(self._window) - num_held
            held = self._window[end:]
            self._restart(self._window[self._num_known : end])
            self._window.extend(held)
        return added

    def _decode_complete(self) -> tuple[str, int]:
        """The text up to the last whole character, and how many ids come after it."""
        text = whole = self._vocabulary.decode(self._window)
        num_held, num_new = 0, len(self._window) - self._num_known
        while text.endswith(REPLACEMENT):
            num_held += 1
            if num_held > num_new:
                return "", num_new
            if num_held > _MAX_HELD:
                return whole, 0
            text = self._vocabulary.decode(self._window[:-num_held])
        return text, num_held

    def _push_apart(self, token_id: int) -> str:
        """An added token right after another one is written as it is."""
        is_added = token_id in self._vocabulary.added_ids
        is_apart = is_added and self._is_after_added
        self._is_after_added = is_added
        if not is_apart:
            return self._push([token_id])
        text = self.finish() + self._vocabulary.name(token_id)
        self._restart([token_id])
        return text

    def _restart(self, window: Sequence[int]) -> None:
        self._window = list(window)
        self._num_known = len(self._window)
        self._known = self._vocabulary.decode(self._window)
