"""Long lists of token ids in a body: cut out before it is validated, and read in portions.

They are most of the largest honest bodies, and reading one at once would hold the event loop for
a tenth of a second. In its place the body gets a list with one number that stands for it.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from pydantic import BaseModel

from tokenmesh.services.gateway.http.turns import Turns
from tokenmesh.shared.errors import PayloadTooLarge

_MIN_BYTES: Final = 1024
_MAX_LISTS: Final = 8192
"""With more lists of any kind none is looked for."""
_PORTION_BYTES: Final = 32 * 1024
_HIGHEST: Final = 2**32 - 1
"""Numbers from here down stand for lists."""

_Ids = list[Annotated[int, msgspec.Meta(ge=0, le=_HIGHEST)]]
_decoder: Final = msgspec.json.Decoder(_Ids)


class IdLists:
    """Those of one body."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._lists: list[list[int]] = []

    def __bool__(self) -> bool:
        return bool(self._lists)

    async def cut(self, data: bytes) -> bytes:
        """The body without them. What looks like one within a string is cut, too: see `fill`.

        Raises PayloadTooLarge.
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
        """Put them back; False: not all are where a list of ids may be, the body is to be read
        as a whole."""
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
    """Where long lists without a list in them begin and end, brackets not included."""
    if data.count(b"]") > _MAX_LISTS:
        return
    before, end = 0, data.find(b"]")
    while end >= 0:
        start = data.rfind(b"[", before, end) + 1
        if start and end - start >= _MIN_BYTES:
            yield start, end
        before, end = end + 1, data.find(b"]", end + 1)


async def _read(data: bytes, start: int, end: int, turns: Turns, room: int) -> list[int] | None:
    """The ids between two positions; None: there is something else. Raises PayloadTooLarge."""
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
        # Once it looks like ids: a list that is too long is refused before it is read.
        if len(ids) + data.count(b",", comma, end) > room:
            raise PayloadTooLarge("the body holds more token ids than gateway.max_json_ids")
        start = comma + 1
        await turns.rest()
    return ids


def _holders(body: BaseModel) -> Iterator[tuple[Any, Any]]:
    """Where the fields of a body, and lists in them, hold a list of one number."""
    fields = body.__dict__
    for name, value in fields.items():
        if isinstance(value, list):
            if _only(value) >= 0:
                yield fields, name
            else:
                yield from ((value, i) for i, each in enumerate(value) if _only(each) >= 0)


def _only(value: object) -> int:
    """The number in a list of one; -1: it is something else."""
    if isinstance(value, list) and len(value) == 1 and type(value[0]) is int:
        return value[0]
    return -1
