"""IdLists: the long lists of token ids in a body, which are read before the rest is validated.

They make up most of the largest legitimate bodies, and reading one at once would block the event
loop for a tenth of a second: they are removed before validation and read in portions.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from pydantic import BaseModel

from tokenmesh.services.gateway.http.event_loop import Turns
from tokenmesh.shared.errors import PayloadTooLarge

_MIN_BYTES: Final = 1024
_MAX_LISTS: Final = 8192
"""A body with more lists of any kind is validated as it is."""
_PORTION_BYTES: Final = 32 * 1024
_HIGHEST: Final = 2**32 - 1
"""The numbers from here downwards stand for lists."""

_Ids = list[Annotated[int, msgspec.Meta(ge=0, le=_HIGHEST)]]
_decoder: Final = msgspec.json.Decoder(_Ids)


class IdLists:
    """The long lists of one body."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._lists: list[list[int]] = []

    def __bool__(self) -> bool:
        return bool(self._lists)

    async def cut(self, data: bytes) -> bytes:
        """The body without its long lists. Raises PayloadTooLarge.

        What looks like a list within a string is removed too: `fill` then returns False.
        """
        turns = Turns()
        kept, done, room = [], 0, self._max_ids
        for start, end in _candidates(data):
            ids = await _read(data, start, end, turns, room)
            if ids is not None:
                room -= len(ids)
                kept += [data[done:start], b"%d" % (_HIGHEST - len(self._lists))]
                done = end
                self._lists.append(ids)
            await turns.rest()
        return b"".join((*kept, data[done:])) if kept else data

    def fill(self, body: BaseModel) -> bool:
        """Put the lists back. False: one is not in a field for ids, validate the whole body."""
        places = [
            (holder, key, place)
            for holder, key in _holders(body)
            if (place := _HIGHEST - _only(holder[key])) < len(self._lists)
        ]
        if sorted(place for _, _, place in places) != list(range(len(self._lists))):
            return False
        for holder, key, place in places:
            holder[key] = self._lists[place]
        return True


def _candidates(data: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of long lists without inner lists, brackets excluded."""
    if data.count(b"]") > _MAX_LISTS:
        return
    before, end = 0, data.find(b"]")
    while end >= 0:
        start = data.rfind(b"[", before, end) + 1
        if start and end - start >= _MIN_BYTES:
            yield start, end
        before, end = end + 1, data.find(b"]", end + 1)


async def _read(data: bytes, start: int, end: int, turns: Turns, room: int) -> list[int] | None:
    """The ids between two positions; None if there is anything else. Raises PayloadTooLarge."""
    ids: list[int] = []
    while start < end:
        cut = min(start + _PORTION_BYTES, end)
        comma = data.rfind(b",", start, cut) if cut < end else end
        if comma < 0:
            return None
        try:
            ids += _decoder.decode(b"[%b]" % data[start:comma])
        except msgspec.DecodeError:
            return None
        # These are ids: a list that is too long is refused before all of it is read.
        if len(ids) + data.count(b",", comma, end) > room:
            raise PayloadTooLarge("the body holds more token ids than gateway.max_json_ids")
        start = comma + 1
        await turns.rest()
    return ids


def _holders(body: BaseModel) -> Iterator[tuple[Any, Any]]:
    """Containers and keys, in the fields of a body and lists in them, of lists with one number."""
    fields = body.__dict__
    for name, value in fields.items():
        if isinstance(value, list):
            if _only(value) >= 0:
                yield fields, name
            else:
                yield from ((value, i) for i, each in enumerate(value) if _only(each) >= 0)


def _only(value: object) -> int:
    """The number in a list of one number; -1 for anything else."""
    if isinstance(value, list) and len(value) == 1 and type(value[0]) is int:
        return value[0]
    return -1
