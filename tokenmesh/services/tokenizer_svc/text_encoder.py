"""TextEncoder: the ids of texts of any length, for one model. Safe to call from threads.

A long text is divided at borders and encoded in portions: each keeps other threads waiting for
less than 5 ms, the memory of one is free before the next, and what truncation drops is mostly not
encoded at all. What has no borders is encoded at once up to a limit, which keeps them waiting for
10 ms, and refused above.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from tokenizers import Tokenizer

from tokenmesh.services.tokenizer_svc.encoding import (
    Frame,
    Ids,
    Side,
    encode_texts,
    encode_with_offsets,
    num_bytes,
    read_frame,
    truncate_ids,
)
from tokenmesh.services.tokenizer_svc.text_borders import Borders, find_borders
from tokenmesh.services.tokenizer_svc.word_cache import word_cache
from tokenmesh.shared.allocator import trim_heap
from tokenmesh.shared.errors import PayloadTooLarge

PORTION_CHARS: Final = 1 << 15
"""Characters of a portion, where there are borders."""
_MOST_RUN_BYTES: Final = 1 << 19
"""The most bytes of a portion that has no border inside, in UTF-8, since each may be a token. While
the ids of so many tokens become a list, and the tokenizer's own are freed, other threads wait for
10 ms; for as many bytes in Chinese, 174,000 characters, 4 ms. A smaller bound would refuse a long
prompt in Chinese where a tokenizer has borders at spaces only."""
_TRIMMED_CHARS: Final = 1 << 17
"""After a longer text the memory that the tokenizer has freed is given back to the system."""


class TextEncoder:
    """The texts of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, lean_json: bytes | None = None) -> None:
        """`lean_json`: the tokenizer's, with or without merges, where it is at hand."""
        lean_json = lean_json or tokenizer.to_str().encode()
        self._tokenizer = tokenizer
        self._borders = find_borders(tokenizer, lean_json)
        self._words = word_cache(tokenizer, lean_json)
        self._frames: dict[tuple[bool, bool], Frame] = {}

    def frame(self, *, is_pair: bool, with_special: bool) -> Frame:
        """Return what the tokenizer puts around texts. Raises CheckpointError."""
        key = is_pair, with_special
        frame = self._frames.get(key)
        if frame is None:
            frame = read_frame(self._tokenizer, is_pair=is_pair, with_special=with_special)
            self._frames[key] = frame
        return frame

    def work(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        side: Side = "left",
        enough: int | None = None,
    ) -> tuple[Callable[[], Ids], int]:
        """Return a call that gives the ids of a text, and its cost in encoded characters.

        Truncation to `max_tokens` keeps the added special tokens, as in transformers; `side` names
        the end that is cut off. `enough`: of a divided text that is not truncated, ids may be left
        out at its end once there are more. The call raises PayloadTooLarge.
        """
        bare: Callable[[], Ids] | None = None
        cost = len(text)
        if self._words is not None and cost <= PORTION_CHARS:
            bare, cost = self._words.work(text)
        if max_tokens is None:
            is_whole = self._borders is None or len(text) <= PORTION_CHARS
            if add_special_tokens and bare is None and is_whole:
                encode = partial(encode_texts, self._tokenizer, [text], add_special_tokens=True)
                return lambda: encode()[0], cost
            bare = bare or partial(self.ids, text, enough)
        return partial(self._framed, text, bare, add_special_tokens, max_tokens, side), cost

    def _framed(
        self,
        text: str,
        bare: Callable[[], Ids] | None,
        add_special_tokens: bool,
        max_tokens: int | None,
        side: Side,
    ) -> Ids:
        # `Encoding.truncate` would keep what it cuts off, as an object for each piece
        frame = self.frame(is_pair=False, with_special=add_special_tokens)
        room = None if max_tokens is None else max(0, max_tokens - frame.num_special)
        ids = self.ids(text, room, side) if bare is None else bare()
        return frame.ids(truncate_ids(ids, room, side), [])

    def ids(self, text: str, most: int | None = None, side: Side = "right") -> Ids:
        """The ids without special tokens; of a text that has more than `most`, some more than that.

        `side` names the end whose ids may be left out. Raises PayloadTooLarge.
        """
        portions: list[Ids] = []
        num_ids = 0
        for portion in self._portions(text, side):
            portions.append(self._encode(portion))
            num_ids += len(portions[-1])
            if most is not None and num_ids > most:
                break
        if side == "left":
            portions.reverse()
        if len(text) > _TRIMMED_CHARS:
            trim_heap()
        return portions[0] if len(portions) == 1 else [token for ids in portions for token in ids]

    def offsets(
        self, text: str, add_special_tokens: bool, max_tokens: int | None, side: Side
    ) -> tuple[Ids, Ids]:
        """The ids that `work` gives, and two numbers for each: where it begins and ends in the
        text; 0 and 0 of a special token that is added. Raises PayloadTooLarge.
        """
        ids: Ids = []
        places: list[tuple[int, int]] = []
        ends = [(0, len(text))]
        if self._borders is not None:
            ends = list(_ends_from_start(text, self._borders))
        for start, stop in ends:
            found, offsets = encode_with_offsets(self._tokenizer, text[start:stop])
            ids += found
            places += [(start + begin, start + end) for begin, end in offsets]
        frame = self.frame(is_pair=False, with_special=add_special_tokens)
        if max_tokens is not None:
            room = max(0, max_tokens - frame.num_special)
            kept = slice(max(0, len(ids) - room), None) if side == "left" else slice(0, room)
            ids, places = ids[kept], places[kept]
        before, after = [0] * 2 * len(frame.before), [0] * 2 * len(frame.after)
        flat = [number for place in places for number in place]
        return frame.ids(ids, []), [*before, *flat, *after]

    def all_ids(
        self, texts: Sequence[str], most: int | None = None, side: Side = "right"
    ) -> list[Ids]:
        """The ids of each text, in order. Short texts are encoded together."""
        found: list[Ids] = []
        group: list[str] = []
        num_chars = 0
        for text in texts:
            if group and num_chars + len(text) > PORTION_CHARS:
                found += encode_texts(self._tokenizer, group)
                group, num_chars = [], 0
            if len(text) > PORTION_CHARS:
                found.append(self.ids(text, most, side))
            else:
                group.append(text)
                num_chars += len(text)
        return found + (encode_texts(self._tokenizer, group) if group else [])

    def _encode(self, portion: str) -> Ids:
        if self._words is not None and len(portion) <= PORTION_CHARS:
            return self._words.encode(portion)
        return encode_texts(self._tokenizer, [portion])[0]

    def _portions(self, text: str, side: Side) -> Iterator[str]:
        """The portions of a text; those at the end that is kept come first."""
        if self._borders is None:
            yield text
        elif side == "right":
            yield from _from_start(text, self._borders)
        else:
            yield from _from_end(text, self._borders)


def _from_start(text: str, borders: Borders) -> Iterator[str]:
    for start, stop in _ends_from_start(text, borders):
        yield text[start:stop]


def _ends_from_start(text: str, borders: Borders) -> Iterator[tuple[int, int]]:
    """Where portions begin and end."""
    start = 0
    while len(text) - start > PORTION_CHARS:
        half, full, most = (start + n for n in (PORTION_CHARS // 2, PORTION_CHARS, _MOST_RUN_BYTES))
        stop = borders.last(text, half, full)
        stop = borders.first(text, full, most) if stop is None else stop
        if stop is None:
            _check_run(text[start : most + 1])
            break
        _check_run(text[start:stop])
        yield start, stop
        start = borders.behind(stop, text)
    yield start, len(text)


def _from_end(text: str, borders: Borders) -> Iterator[str]:
    stop = len(text)
    while stop > PORTION_CHARS:
        half, full, most = (stop - n for n in (PORTION_CHARS // 2, PORTION_CHARS, _MOST_RUN_BYTES))
        start = borders.first(text, full, half)
        start = borders.last(text, max(0, most), full) if start is None else start
        if start is None:
            _check_run(text[max(0, most - 1) : stop])
            break
        _check_run(text[start:stop])
        yield text[borders.behind(start, text) : stop]
        stop = start
    yield text[:stop]


def _check_run(run: str) -> None:
    if num_bytes(run) > _MOST_RUN_BYTES:
        raise PayloadTooLarge(
            f"the text has {_MOST_RUN_BYTES} bytes without a space between two words: so many "
            "cannot be encoded at once"
        )
