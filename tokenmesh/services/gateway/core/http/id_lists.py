"""IdLists: the lists of token ids in a body, which are read before the rest is validated.

They make up most of the largest legitimate bodies, prompts as well as batches of thousands of short
ones, and reading them at once would block the event loop for a tenth of a second: they are removed
before validation and read in portions.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, get_args

import msgspec
from annotated_types import MaxLen
from pydantic import BaseModel

from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

_MIN_BYTES: Final = 1024
_MAX_LISTS: Final = 16_384
"""A body with more lists of any kind is validated as it is."""
_PORTION_BYTES: Final = 32 * 1024
_COUNTED_BYTES: Final = 256 * 1024
_HIGHEST: Final = 2**32 - 1
"""The numbers from here downwards stand for lists."""
_STEP: Final = 256
"""Values between two looks at the clock."""
_CACHED_FIELDS: Final = 4096
_BLANKS: Final = b" \t\r\n"

_Ids = list[Annotated[int, msgspec.Meta(ge=0, le=_HIGHEST)]]
_decoder: Final = msgspec.json.Decoder(_Ids)
_lists_decoder: Final = msgspec.json.Decoder(list[_Ids])

_Bounds = tuple[int, int]
"""Start and end of a list without inner lists, brackets excluded."""


class IdLists:
    """The lists of one body."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = self._room = max_ids
        self._runs: list[list[list[int]]] = []
        """Each is one list, or several that follow each other."""

    def __bool__(self) -> bool:
        return bool(self._runs)

    async def cut(self, data: bytes) -> bytes:
        """The body with a list of one number in place of each run. Raises PayloadTooLarge.

        What looks like a list within a string is removed too: `fill` then returns False.
        """
        turns = Turns()
        kept, done = [], 0
        async for run in _runs(data, turns):
            first = len(self._runs)
            parts = [run]
            if not await self._take(data, run, turns):
                # One of them may hold something else.
                parts = [[each] for each in run if await self._take(data, [each], turns)]
            for number, part in enumerate(parts, first):
                kept += [data[done : part[0][0]], b"%d" % (_HIGHEST - number)]
                done = part[-1][1]
        return b"".join((*kept, data[done:])) if kept else data

    async def _take(self, data: bytes, run: list[_Bounds], turns: Turns) -> bool:
        """Read the lists of a run; False: they are short, or there is something but ids."""
        found: list[list[int]] = []
        room, end = self._room, run[-1][1]
        if end - run[0][0] < _MIN_BYTES:
            return False
        for part in _portions(run):
            lists = await _read(data, part, turns, room)
            if lists is None:
                return False
            room -= sum(map(len, lists))
            if not found and await _num_commas(data, part[-1][1], end, turns) - len(run) > room:
                # These are ids: too many are refused before all of them are read.
                raise _too_many()
            found += lists
            await turns.rest()
        if room < 0:
            raise _too_many()
        self._room = room
        self._runs.append(found)
        return True

    async def fill(self, body: BaseModel) -> bool:
        """Put the lists back. False: one is not in a field for ids, validate the whole body."""
        places = [
            (holder, key, place)
            async for holder, key in _holders(body)
            if (place := _HIGHEST - _only(holder[key])) < len(self._runs)
        ]
        if sorted(place for _, _, place in places) != list(range(len(self._runs))):
            return False
        # Several in place of one are possible in a list only.
        if any(len(self._runs[place]) > 1 and isinstance(key, str) for _, key, place in places):
            return False
        # From the back, so that the others of a list keep their places.
        for holder, key, place in reversed(places):
            lists = self._runs[place]
            if isinstance(key, str):
                holder[key] = lists[0]
            else:
                holder[key : key + 1] = lists
        return True


def _too_many() -> PayloadTooLarge:
    return PayloadTooLarge("the body holds more token ids than gateway.max_json_ids")


async def _runs(data: bytes, turns: Turns) -> AsyncIterator[list[_Bounds]]:
    """Lists without inner lists that follow each other."""
    if data.count(b"]") > _MAX_LISTS:
        return
    run: list[_Bounds] = []
    before, end = 0, data.find(b"]")
    while end >= 0:
        start = data.rfind(b"[", before, end) + 1
        if start:
            if run and data[run[-1][1] + 1 : start - 1].strip(_BLANKS) != b",":
                yield run
                run = []
            run.append((start, end))
        await turns.rest()
        before, end = end + 1, data.find(b"]", end + 1)
    if run:
        yield run


def _portions(run: list[_Bounds]) -> Iterator[list[_Bounds]]:
    part: list[_Bounds] = []
    for each in run:
        if part and each[1] - part[0][0] > _PORTION_BYTES:
            yield part
            part = []
        part.append(each)
    yield part


async def _read(
    data: bytes, part: list[_Bounds], turns: Turns, room: int
) -> list[list[int]] | None:
    """The ids of some lists; None if there is anything else. Raises PayloadTooLarge."""
    start, end = part[0][0], part[-1][1]
    if end - start > _PORTION_BYTES:
        ids = await _read_long(data, start, end, turns, room)
        return None if ids is None else [ids]
    try:
        return _lists_decoder.decode(b"[[%b]]" % data[start:end])
    except msgspec.DecodeError:
        return None


async def _num_commas(data: bytes, start: int, end: int, turns: Turns) -> int:
    num = 0
    while start < end:
        num += data.count(b",", start, min(start + _COUNTED_BYTES, end))
        start += _COUNTED_BYTES
        await turns.rest()
    return num


async def _read_long(
    data: bytes, start: int, end: int, turns: Turns, room: int
) -> list[int] | None:
    """The ids between two positions; None if there is anything else. Raises PayloadTooLarge."""
    ids: list[int] = []
    is_first = True
    while start < end:
        cut = min(start + _PORTION_BYTES, end)
        comma = data.rfind(b",", start, cut) if cut < end else end
        if comma < 0:
            return None
        try:
            ids += _decoder.decode(b"[%b]" % data[start:comma])
        except msgspec.DecodeError:
            return None
        if is_first and len(ids) + await _num_commas(data, comma, end, turns) > room:
            raise _too_many()
        start, is_first = comma + 1, False
        await turns.rest()
    return ids


async def _holders(body: BaseModel) -> AsyncIterator[tuple[Any, Any]]:
    """Containers and keys of lists with one number: fields, and entries of lists in fields."""
    turns, models, num_seen = Turns(), [body], 0
    while models:
        model = models.pop()
        fields = model.__dict__
        for name, value in fields.items():
            if isinstance(value, BaseModel):
                models.append(value)
            if not isinstance(value, list) or not _takes_any_length(type(model), name):
                continue
            if _only(value) >= 0:
                yield fields, name
                continue
            for index, each in enumerate(value):
                if _only(each) >= 0:
                    yield value, index
                elif isinstance(each, BaseModel):
                    models.append(each)
                num_seen += 1
                if num_seen % _STEP == 0:
                    await turns.rest()


@lru_cache(_CACHED_FIELDS)
def _takes_any_length(model: type[BaseModel], name: str) -> bool:
    """Return whether a field's lists have no bound of their length, which validation would
    check.
    """
    field = model.model_fields.get(name)
    return field is not None and not _is_bounded(field.annotation, field.metadata)


def _is_bounded(kind: Any, metadata: Iterable[Any]) -> bool:
    found = [each for given in metadata for each in getattr(given, "metadata", (given,))]
    if any(isinstance(each, MaxLen) for each in found):
        return True
    inner = get_args(kind)
    if not hasattr(kind, "__metadata__"):
        return any(_is_bounded(each, ()) for each in inner)
    return _is_bounded(inner[0], kind.__metadata__)


def _only(value: object) -> int:
    """The number in a list of one number; -1 for anything else."""
    if isinstance(value, list) and len(value) == 1 and type(value[0]) is int:
        return value[0]
    return -1


def check_vocabulary(
    name: str, ids: Sequence[int], vocab_size: int, param: str | None = None
) -> None:
    """Raise InvalidInput for token ids that the model does not have. `param`: else the name."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise InvalidInput(
            f"{name}: token id {highest} is out of vocabulary (0 to {vocab_size - 1})",
            param=param or name,
        )
