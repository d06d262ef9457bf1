"""Every call that encodes text or decodes ids, and what is done with ids: truncation, checks.

Nothing else in the package calls a tokenizer's `encode` (tests/test_bounded_calls.py): that one
keeps all other threads of the process waiting, as the forms for batches do not. Each call is
bounded in characters or ids. Safe to call from threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tokenizers import Tokenizer

from tokenmesh.shared.clock import sleep_s
from tokenmesh.shared.errors import CheckpointError, InvalidInput, PayloadTooLarge
from tokenmesh.shared.messages.tokenize import BAD_WORDS_CHARS
from tokenmesh.shared.tokens import BYTES_PER_ID, count_ids, unpack_ids

Side = Literal["left", "right"]
Ids = list[int]
MOST_BYTES: Final = 1 << 20
"""In UTF-8, of texts that are encoded at once: up to a second of a thread, 20 ms of which keep all
other threads waiting, and some 200 MB. Texts of which it is known where they may be divided take
much less (text_encoder.py)."""
MOST_DECODED_IDS: Final = 1 << 18
"""While the tokenizer takes so many from their list, other threads wait for 5 ms."""
_SLICE_IDS: Final = 1 << 15
"""Ids that are unpacked and compared in less than a millisecond."""
_PAUSE_S: Final = 1e-4
_PROBE: Final = "a 0"
"""Any text with tokens: shows which special tokens stand around it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens around a text, or around the two texts of a pair, and all type ids."""

    before: Ids
    between: Ids
    """Empty for a single text."""
    after: Ids
    special_types: tuple[bytes, bytes, bytes]
    """The type ids of the three above."""
    first_type: int
    second_type: int

    @property
    def num_special(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def ids(self, first: Ids, second: Ids) -> Ids:
        return [*self.before, *first, *self.between, *second, *self.after]

    def types(self, num_first: int, num_second: int) -> bytes:
        """One byte for each token of `ids`."""
        before, between, after = self.special_types
        first = bytes([self.first_type]) * num_first
        second = bytes([self.second_type]) * num_second
        return before + first + between + second + after


def read_frame(tokenizer: Tokenizer, *, is_pair: bool, with_special: bool) -> Frame:
    """Find out how the tokenizer's post-processor puts texts together. Raises CheckpointError."""
    length = len(encode_texts(tokenizer, [_PROBE])[0])
    probe = (_PROBE, _PROBE) if is_pair else _PROBE
    (whole,) = tokenizer.encode_batch([probe], add_special_tokens=with_special)
    sequences: list[int | None] = whole.sequence_ids
    begin = sequences.index(0) if length else 0
    middle = sequences.index(1) if length and is_pair else begin + length
    end = middle + length if is_pair else middle
    in_order = [0] * length + [None] * (middle - begin - length) + [1] * (end - middle)
    around = {*sequences[:begin], *sequences[end:]}
    if not length or sequences[begin:end] != in_order or around - {None}:
        raise CheckpointError("the tokenizer's post-processor does not keep texts in their order")
    types = whole.type_ids
    return Frame(
        whole.ids[:begin],
        whole.ids[begin + length : middle],
        whole.ids[end:],
        (bytes(types[:begin]), bytes(types[begin + length : middle]), bytes(types[end:])),
        types[begin],
        types[middle] if is_pair else 0,
    )


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = False
) -> list[Ids]:
    """The ids of each text. Raises PayloadTooLarge for more than `MOST_BYTES` together."""
    # Only the batch form lets other threads run, and can omit offsets.
    encodings = tokenizer.encode_batch_fast(_checked(texts), add_special_tokens=add_special_tokens)
    return [encoding.ids for encoding in encodings]


def encode_with_ends(tokenizer: Tokenizer, text: str) -> tuple[Ids, list[int]]:
    """The ids of a text and where each ends. Raises PayloadTooLarge above `MOST_BYTES`."""
    (encoding,) = tokenizer.encode_batch(_checked([text]), add_special_tokens=False)
    return encoding.ids, [end for _, end in encoding.offsets]


def encode_with_offsets(tokenizer: Tokenizer, text: str) -> tuple[Ids, list[tuple[int, int]]]:
    """The ids of a text, and where each begins and ends. Raises as `encode_with_ends`."""
    (encoding,) = tokenizer.encode_batch(_checked([text]), add_special_tokens=False)
    return encoding.ids, encoding.offsets


def decode_ids(tokenizer: Tokenizer, packed: bytes, vocab_size: int, param: str) -> str:
    """The text of ids that passed `check_number`, special tokens included. Raises InvalidInput."""
    ids = given_ids(packed, vocab_size, param)
    # Only the batch form lets other threads run. It is called once: a decoder drops a space at the
    # start of its text, and a character may be in several tokens.
    (text,) = tokenizer.decode_batch([ids], skip_special_tokens=False)
    return str(text)


def check_number(packed: bytes, param: str) -> None:
    """Raise InvalidInput for more ids than are decoded at once."""
    if count_ids(packed) > MOST_DECODED_IDS:
        raise InvalidInput(
            f"{param} holds {count_ids(packed)} ids, at most {MOST_DECODED_IDS} are decoded",
            param=param,
        )


def _checked(texts: Sequence[str]) -> list[str]:
    num_chars = sum(map(len, texts))
    # A character has at most four.
    if 4 * num_chars > MOST_BYTES and sum(map(num_bytes, texts)) > MOST_BYTES:
        raise PayloadTooLarge(
            f"a text of {num_chars} characters cannot be divided where the tokenizer reads it in "
            f"pieces, and at most {MOST_BYTES} bytes can be read at once"
        )
    return list(texts)


def num_bytes(text: str) -> int:
    """The length of a text in UTF-8."""
    return len(text.encode(errors="surrogatepass"))


def truncate_ids(ids: list[int], max_tokens: int | None, side: Side) -> list[int]:
    """At most `max_tokens` of the ids; `side` names the end that is cut off."""
    if max_tokens is None or len(ids) <= max_tokens:
        return ids
    return ids[len(ids) - max_tokens :] if side == "left" else ids[:max_tokens]


def given_ids(packed: bytes, vocab_size: int, param: str = "prompt") -> Ids:
    """Ids that a client sent. Raises InvalidInput."""
    if len(packed) % BYTES_PER_ID:
        raise InvalidInput("token_ids is not a list of 32-bit ids", param=param)
    ids: Ids = []
    for start in range(0, len(packed), _SLICE_IDS * BYTES_PER_ID):
        if start:
            # A thread that waits takes over here. Without a pause it waits for 5 ms more.
            sleep_s(_PAUSE_S)
        found = unpack_ids(packed[start : start + _SLICE_IDS * BYTES_PER_ID])
        _check_ids(found, len(ids), vocab_size, param)
        ids += found
    return ids


def _check_ids(found: Ids, first: int, vocab_size: int, param: str) -> None:
    """Raise InvalidInput with the position of an id that is out of range."""
    if not found or max(found) < vocab_size:
        return
    place = next(place for place, token in enumerate(found) if token >= vocab_size)
    raise InvalidInput(
        f"token id {found[place]} at position {first + place} is out of range [0, {vocab_size})",
        param=param,
    )


def token_limit(requested: int | None, max_model_len: int | None) -> int | None:
    """`truncate_prompt_tokens` as a number of tokens; None: no truncation."""
    if requested is None:
        return None
    if requested == -1:
        return max_model_len
    if requested < 1:
        raise InvalidInput(
            f"truncate_prompt_tokens must be at least 1, or -1 for the model's length; "
            f"got {requested}",
            param="truncate_prompt_tokens",
        )
    return requested


def check_bad_words(words: Sequence[str], most: int) -> int:
    """The characters of all words. Raises InvalidInput for too many of them."""
    if len(words) > most:
        raise InvalidInput(
            f"bad_words holds {len(words)} entries, at most {most} are allowed",
            param="bad_words",
        )
    num_chars = sum(map(len, words))
    if num_chars > BAD_WORDS_CHARS:
        raise InvalidInput(
            f"bad_words holds {num_chars} characters, at most {BAD_WORDS_CHARS}", param="bad_words"
        )
    return num_chars


def bad_words_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Each word's ids at the start of a text, and after a space where those differ, as in vLLM."""
    bare = [word.lstrip() for word in words]
    both = encode_texts(tokenizer, [*bare, *(f" {word}" for word in bare)])
    sequences: list[list[int]] = []
    for index, plain in enumerate(both[: len(words)]):
        if not plain:
            raise InvalidInput(f"bad_words[{index}] is empty", param="bad_words")
        sequences.append(plain)
        spaced = both[len(words) + index]
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    return sequences


def token_strings(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The vocabulary entry of each id; empty for padding ids."""
    return [tokenizer.id_to_token(token) or "" for token in ids]
