"""TextBatch: the ids of many texts or pairs of texts, for models that answer with numbers.

Texts are encoded in portions, between which other tenants have their turn. Special tokens are added
here, not by the tokenizer: each text of a pair is encoded once, however many pairs it is in, and
truncation leaves no encodings of what was cut off.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from tokenmesh.services.tokenizer_svc.encoding import Frame, Ids, Side, truncate_ids
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.services.tokenizer_svc.token_length import LengthBound
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import (
    DeadlineExceeded,
    InvalidInput,
    PayloadTooLarge,
    PromptTooLong,
    ProtocolError,
)
from tokenmesh.shared.messages.tokenize import TextsTokenized, TokenizeTexts
from tokenmesh.shared.telemetry.span import span
from tokenmesh.shared.tokens import pack_ids

_PORTION_CHARS: Final = 32 * 1024
"""Texts that are encoded in one go; a longer text is a portion by itself."""


class TextBatch:
    """The texts of one model."""

    def __init__(
        self,
        encoder: TextEncoder,
        limits: TokenizerSettings,
        threads: Threads,
        bound: LengthBound | None,
        *,
        has_type_ids: bool,
        around: tuple[str, str] = ("", ""),
        embed_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`has_type_ids`: whether the model reads which text of a pair a token belongs to.

        around: what the model's processor puts before and behind a text. embed_ids: tokens that
        stand for media, which no text may hold.
        """
        self._around = around
        self._embed_ids = embed_ids
        self._encoder = encoder
        self._has_type_ids = has_type_ids
        self._limits = limits
        self._threads = threads
        self._bound = bound

    async def tokenize(self, message: TokenizeTexts, deadline_s: float) -> TextsTokenized:
        """Raises InvalidInput that names a text by `path`, Overloaded, DeadlineExceeded."""
        self.check(message)
        frame = self._encoder.frame(
            is_pair=bool(message.pairs), with_special=message.add_special_tokens
        )
        with span("encode", {"tokenmesh.texts": max(len(message.texts), len(message.pairs))}):
            firsts = await self._encode_all("texts", message.texts, message, deadline_s)
            seconds = await self._encode_all("pairs", message.pairs, message, deadline_s)
            work = partial(self._assemble, frame, firsts, seconds, message)
            num_ids = sum(map(len, firsts)) + sum(map(len, seconds))
            return await self._threads.run_text(message.tenant, num_ids, work)

    def check(self, message: TokenizeTexts) -> None:
        """Refuse a wrong request before anything is encoded. Raises InvalidInput."""
        texts, pairs, limits = message.texts, message.pairs, self._limits
        if pairs and len(texts) not in (1, len(pairs)):
            raise ProtocolError(f"{len(texts)} texts do not make {len(pairs)} pairs")
        if max(len(texts), len(pairs)) > limits.max_texts:
            raise PayloadTooLarge(f"a message holds more than {limits.max_texts} texts")
        for field, given in (("texts", texts), ("pairs", pairs)):
            for index, text in enumerate(given):
                if len(text) > limits.max_prompt_chars:
                    raise PayloadTooLarge(
                        f"the text has {len(text)} characters, at most {limits.max_prompt_chars} "
                        "(tokenizer.max_prompt_chars)",
                        param=str(index),
                        path=(field, index),
                    )
                if message.truncate_prompt_tokens is None:
                    self._check_length(text, field, index, message)

    def _check_length(self, text: str, field: str, index: int, message: TokenizeTexts) -> None:
        """Refuse a text that no encoding makes short enough."""
        limit, is_first = message.context_tokens, field == "texts"
        is_cut = message.max_text_tokens if is_first else message.max_pair_tokens
        if limit is None or is_cut is not None or self._bound is None:
            return
        num_tokens = self._bound.least_tokens(text, limit)
        if num_tokens:
            raise _too_long(
                limit,
                f"your text of {len(text)} characters resulted in at least {num_tokens} tokens",
                (field, index),
            )

    async def _encode_all(
        self, field: str, texts: Sequence[str], message: TokenizeTexts, deadline_s: float
    ) -> list[Ids]:
        is_first = field == "texts"
        limit = message.max_text_tokens if is_first else message.max_pair_tokens
        found: list[Ids] = []
        for portion in _portions(texts):
            if now_s() > deadline_s:
                raise DeadlineExceeded("the texts were not encoded in time")
            if message.add_special_tokens and any(self._around):
                before, behind = self._around
                portion = [f"{before}{text}{behind}" for text in portion]
            work = partial(self._encode, portion, limit, message)
            cost = sum(map(len, portion))
            try:
                found += await self._threads.run_text(message.tenant, cost, work)
            except PayloadTooLarge as error:
                # Only a long text is refused, which is a portion by itself.
                error.param, error.path = str(len(found)), (field, len(found))
                raise
        return found

    def _encode(self, texts: list[str], limit: int | None, message: TokenizeTexts) -> list[Ids]:
        """`limit`: before special tokens are added; others are left out where they are encoded."""
        whole, side = message.truncate_prompt_tokens, message.truncation_side
        # Of a pair the longer text is cut first: both lengths must be known.
        most = [each for each in (limit, None if message.pairs else whole) if each]
        ids = self._encoder.all_ids(texts, min(most, default=None), side)
        return [truncate_ids(each, limit, side) for each in ids]

    def _assemble(
        self, frame: Frame, firsts: list[Ids], seconds: list[Ids], message: TokenizeTexts
    ) -> TextsTokenized:
        limit = message.truncate_prompt_tokens
        room = None if limit is None else limit - frame.num_special
        if room is not None and room < (2 if seconds else 1):
            raise InvalidInput(
                f"truncate_prompt_tokens {limit} leaves no room for a text: the model adds "
                f"{frame.num_special} special tokens",
                param="truncate_prompt_tokens",
            )
        token_ids, type_ids = [], []
        for index in range(max(len(firsts), len(seconds))):
            first = firsts[index if len(firsts) > 1 else 0]
            second = seconds[index] if seconds else []
            if room is not None:
                first, second = _cut(first, second, room, message.truncation_side)
            ids = frame.ids(first, second)
            _check_ids(ids, index, message)
            if self._embed_ids and not self._embed_ids.isdisjoint(ids):
                raise InvalidInput(
                    "the text holds a token that stands for media",
                    param=str(index),
                    path=("pairs" if message.pairs else "texts", index),
                )
            token_ids.append(pack_ids(ids))
            if self._has_type_ids:
                type_ids.append(frame.types(len(first), len(second)))
        is_plain = not any(map(any, type_ids))
        return TextsTokenized(token_ids=token_ids, type_ids=[] if is_plain else type_ids)


def _portions(texts: Sequence[str]) -> Iterator[list[str]]:
    portion: list[str] = []
    num_chars = 0
    for text in texts:
        if portion and num_chars + len(text) > _PORTION_CHARS:
            yield portion
            portion, num_chars = [], 0
        portion.append(text)
        num_chars += len(text)
    if portion:
        yield portion


def _cut(first: Ids, second: Ids, room: int, side: Side) -> tuple[Ids, Ids]:
    """Both within `room`: the longer one is cut first, as transformers does by default."""
    if len(first) + len(second) <= room:
        return first, second
    short, long = sorted((len(first), len(second)))
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short = room // 2
        long = room - short
    num_first, num_second = (short, long) if len(first) <= len(second) else (long, short)
    return truncate_ids(first, num_first, side), truncate_ids(second, num_second, side)


def _check_ids(ids: Ids, index: int, message: TokenizeTexts) -> None:
    limit = message.context_tokens
    # Of a pair the second text is named: a query is mostly short, and the same in all pairs.
    path = ("pairs" if message.pairs else "texts", index)
    if not ids:
        raise InvalidInput("the text holds no token", param=str(index), path=path)
    if limit is not None and len(ids) > limit:
        what = "texts" if message.pairs else "text"
        raise _too_long(limit, f"your {what} resulted in {len(ids)} tokens", path)


def _too_long(limit: int, found: str, path: tuple[str, int]) -> PromptTooLong:
    error = PromptTooLong.over(limit, found, "the length of the text", param=str(path[1]))
    error.path = path
    return error
