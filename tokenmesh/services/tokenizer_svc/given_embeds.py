"""Tensors among the texts of a chat: where a template puts them, tokens that stand for them.

A part of a message that is a tensor is a text of one private character that occurs nowhere else in
the conversation. In the rendered prompt a special token of the model takes its place, so that the
texts around it are encoded as around any special token; then as many tokens as the tensor has rows.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import FieldPath, InvalidInput, field_name
from tokenmesh.shared.ids import BlobKey

_SCHEME: Final = "blob:"
_FIRST: Final = 0x100000
"""Private characters from here on are marks; those before are the content guard's."""
_LAST: Final = 0x10FFFD
"""The last private character of Unicode: the two after it are not characters."""
_MARKS: Final = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
_WINDOW: Final = 1 << 14
"""Characters that are searched for marks in less than 2 ms."""


@dataclass(frozen=True, slots=True)
class EmbedsPart:
    """A tensor in the blob store, and the part of a message that is its mark."""

    key: BlobKey
    length: int
    part: JsonObject

    @property
    def mark(self) -> str:
        """The character that stands for it."""
        return str(self.part["text"])


def read_part(part: JsonObject, path: FieldPath) -> EmbedsPart:
    """Read what the gateway has made of a part. Raises InvalidInput."""
    data, length = part.get("data"), part.get("length")
    if not isinstance(data, str) or not data.startswith(_SCHEME) or type(length) is not int:
        raise InvalidInput(
            f"{field_name(path)}: tensors are taken by chats and by what pools chats",
            param="messages",
            path=path,
        )
    return EmbedsPart(BlobKey(data.removeprefix(_SCHEME)), length, {"type": "text", "text": ""})


def put_marks(embeds: Sequence[EmbedsPart], values: Sequence[object]) -> None:
    """Give each tensor a character that none of the values holds."""
    used = {text[at] for text in _strings(values) for at in marked(text)}
    free = (chr(each) for each in range(_FIRST, _LAST + 1) if chr(each) not in used)
    for each, char in zip(embeds, free, strict=False):
        each.part["text"] = char


def marked(text: str) -> Iterator[int]:
    """The places of marks. Other threads wait while a pattern is searched for: so in windows."""
    for start in range(0, len(text), _WINDOW):
        for match in _MARKS.finditer(text, start, start + _WINDOW):
            yield match.start()


def _strings(value: object) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, str):
            if not each.isascii():
                yield each
        elif isinstance(each, Mapping):
            todo.extend((*each.keys(), *each.values()))
        elif isinstance(each, Sequence):
            todo.extend(each)
