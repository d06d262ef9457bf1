"""EmbedsLayout: where the tensors of a chat stand among the ids of its prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from tokenizers import Tokenizer

from tokenmesh.services.tokenizer_svc.encoding import Frame
from tokenmesh.services.tokenizer_svc.given_embeds import EmbedsPart, marked
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.media import EMBEDS, MediaItem

_PLACEHOLDER: Final = 0
"""The token id in place of each row; it is not read."""


def _separator(tokenizer: Tokenizer, taken: frozenset[int]) -> tuple[str, int]:
    """A special token at which a text is divided and that changes nothing around it."""
    for number, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        has_effects = token.lstrip or token.rstrip or token.single_word or token.normalized
        if token.special and not has_effects and token.content.strip() and number not in taken:
            return token.content, number
    raise InvalidInput(
        "the model has no special token between which prompt_embeds could stand", param="messages"
    )


def place_tensors(
    text: str,
    embeds: Sequence[EmbedsPart],
    tokenizer: Tokenizer,
    taken: frozenset[int],
    frame: Frame,
) -> tuple["EmbedsLayout", str]:
    """Where tensors stand in a rendered prompt, and its text with a separator for each.

    taken: tokens that stand for other media. frame: what the tokenizer puts around the text. A
    template may leave out a tensor with its message. Raises InvalidInput where it repeats one.
    """
    separator, separator_id = _separator(tokenizer, taken)
    by_mark = {each.mark: each for each in embeds}
    starts = [(at, by_mark[text[at]]) for at in marked(text) if text[at] in by_mark]
    if len({each.mark for _, each in starts}) < len(starts):
        raise InvalidInput(
            "the chat template writes a part with prompt_embeds more than once", param="messages"
        )
    by_number: dict[int, EmbedsPart] = {}
    pieces, end = [], 0
    number = frame.before.count(separator_id)
    for at, each in starts:
        piece = text[end:at]
        number += piece.count(separator)
        by_number[number] = each
        pieces += [piece, separator]
        number, end = number + 1, at + 1
    pieces.append(text[end:])
    number += pieces[-1].count(separator) + frame.after.count(separator_id)
    return EmbedsLayout(by_number, separator_id, number), "".join(pieces)


@dataclass(frozen=True, slots=True)
class EmbedsLayout:
    """Where the tensors of one prompt stand among its ids."""

    by_number: Mapping[int, EmbedsPart]
    """By the number of the separator that stands for a tensor."""
    separator_id: int
    num_separators: int
    """In the prompt, those of the model's own included."""

    def filled(
        self, ids: list[int], items: Sequence[MediaItem]
    ) -> tuple[list[int], list[MediaItem]]:
        """The ids with a token for each row of a tensor, and the items, tensors included.

        Raises InvalidInput where the ids hold other separators than the text.
        """
        if ids.count(self.separator_id) != self.num_separators:
            raise InvalidInput(
                "prompt_embeds cannot be placed: the tokenizer reads the text around them "
                "differently",
                param="messages",
            )
        return _filled(ids, items, self.by_number, self.separator_id)


def _filled(
    ids: list[int], items: Sequence[MediaItem], by_number: Mapping[int, EmbedsPart], separator: int
) -> tuple[list[int], list[MediaItem]]:
    found: list[int] = []
    tensors: list[MediaItem] = []
    end = 0
    for number in range(max(by_number, default=-1) + 1):
        at = ids.index(separator, end)
        found += ids[end:at]
        each = by_number.get(number)
        if each is None:
            found.append(separator)
        else:
            item = MediaItem(
                kind=EMBEDS,
                content_hash=each.key,
                offset=len(found),
                length=each.length,
                pixels=each.key,
                embeddings=each.key,
            )
            tensors.append(item)
            found += [_PLACEHOLDER] * each.length
        end = at + 1
    return found + ids[end:], _moved(items, tensors)


def _moved(items: Sequence[MediaItem], tensors: Sequence[MediaItem]) -> list[MediaItem]:
    """Items of a prompt behind the tensors that were put before them, and the tensors."""
    moved = []
    for item in items:
        offset = item.offset
        for each in tensors:
            if each.offset <= offset:
                offset += each.length - 1
        moved.append(msgspec.structs.replace(item, offset=offset))
    return sorted([*moved, *tensors], key=lambda each: each.offset)
