"""Checks every parser: the same events however the text is chunked, and no text lost."""

import random
from collections.abc import Callable, Iterator, Sequence

from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Parser,
    Reasoning,
)

Make = Callable[[], Parser]


def parse(make: Make, portions: Sequence[str]) -> list[Event]:
    """All events of a text, neighbours of one kind joined."""
    parser = make()
    events = [event for portion in portions for event in parser.push(portion)]
    return joined(events + parser.finish())


def joined(events: Sequence[Event]) -> list[Event]:
    """Events with neighbours of one kind (and call) joined, and empty ones left out."""
    result: list[Event] = []
    for event in events:
        if not isinstance(event, CallBegin) and not event.text:
            continue
        result.append(event)
        if len(result) > 1 and (both := _join(result[-2], event)) is not None:
            result[-2:] = [both]
    return result


def _join(first: Event, second: Event) -> Event | None:
    match first, second:
        case Reasoning(a), Reasoning(b):
            return Reasoning(a + b)
        case Content(a), Content(b):
            return Content(a + b)
        case CallArguments(index, a), CallArguments(other, b) if index == other:
            return CallArguments(index, a + b)
    return None


def chunkings(text: str, count: int, step: int = 1, seed: int = 7) -> Iterator[list[str]]:
    """Character by character, a single split each `step` characters, and `count` random ones."""
    yield list(text)
    for at in range(1, len(text), step):
        yield [text[:at], text[at:]]
    chance = random.Random(seed)
    for _ in range(count):
        size = chance.choice((1, 2, 4, 8, 32))
        cuts = sorted(chance.choices(range(len(text) + 1), k=max(1, len(text) // size)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check_chunkings(make: Make, text: str, count: int = 50, step: int = 1) -> list[Event]:
    """The events of the whole text, after all chunkings gave the same."""
    whole = parse(make, [text])
    for portions in chunkings(text, count, step):
        assert parse(make, portions) == whole, portions
    return whole


def texts(events: Sequence[Event]) -> str:
    """The joined text of the events."""
    return "".join(event.name if isinstance(event, CallBegin) else event.text for event in events)


def check_nothing_lost(make: Make, text: str, markers: Sequence[str]) -> None:
    """Cut off after each character: all text except markers and whitespace is emitted in order.

    A marker that the cut leaves incomplete may be emitted as text. For formats that emit all text
    (not those that rewrite arguments).
    """
    for end in range(len(text) + 1):
        events = parse(make, [text[:end]])
        assert _bare(texts(events), markers) == _bare(text[:end], markers), text[:end]


def _bare(text: str, markers: Sequence[str]) -> str:
    for marker in sorted(markers, key=len, reverse=True):
        text = text.replace(marker, "")
    return "".join(text.split())
