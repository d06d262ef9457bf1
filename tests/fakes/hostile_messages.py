"""Messages that no process of the mesh sends: bytes, lengths, shapes, versions and headers."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from tokenmesh.shared import codec
from tokenmesh.shared.messages import (
    Drain,
    Ping,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)
from tokenmesh.shared.messages.beat import PROTOCOL

GOLDEN = Path(__file__).resolve().parent.parent / "unit/shared/golden"
COMMANDS = {kind.__name__ for kind in (Drain, Sleep, StartProfile, StopProfile, WakeUp)}
"""Well-formed ones of these do what they say: a client that may write to the bus may command."""

LENGTHS = (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")
"""Codes of array, map, bytes, text and extension with a length of 32 bits."""

_NO_MESSAGES: tuple[object, ...] = (1, "Ping", None, [], {}, {"type": 7})

FORGED_HEADERS: tuple[dict[str, str], ...] = (
    {"tm-schema": "99"},
    {"tm-schema": ""},
    {"tm-deadline": "nan"},
    {"tm-deadline": "soon"},
    {"tm-sent": "inf", "tm-deadline": "1"},
    {"tm-alone": "x" * 2000},
)
HARMLESS_HEADERS: tuple[dict[str, str], ...] = (
    {"tm-deadline": "-1e300"},
    {"tm-deadline": "1e300"},
    {"tm-sent": "-1e300", "tm-deadline": "1e300"},
    {"traceparent": "x" * 2000},
    {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-ff"},
)


def golden() -> Iterator[tuple[str, bytes]]:
    """A message of every kind, every field set."""
    for path in sorted(GOLDEN.glob("*.msgpack")):
        yield path.name.split(".")[0], path.read_bytes()


def undecodable(rng: Random) -> Iterator[bytes]:
    """Nothing that decodes to a message."""
    yield from (b"", b"\x00", b"\xc1" * 64, b'{"type": "Ping"}', codec.encode(Ping()) + b"more")
    yield from (b"\x91" * depth for depth in (64, 3000))
    yield from (b"\x81\xa1a" * 3000, b"\x82\xa4type\xa4Beat\xa7service\xc0")
    yield from (code + b"\xff\xff\xff\xff" for code in LENGTHS)
    yield from (b"\x82\xa4type\xa4Ping\xa1x" + code + b"\xff\xff\xff\xff" for code in LENGTHS)
    yield from (msgspec.msgpack.encode(each) for each in _NO_MESSAGES)
    yield msgspec.msgpack.encode({"type": "AddedInAnotherVersion", "x": 1})
    # \xc1 never begins valid msgpack
    yield from (b"\xc1" + rng.randbytes(size) for size in (1, 100, 5000))
    for name, data in golden():
        if len(data) > 8:
            yield data[: rng.randrange(1, len(data))]
        if name not in COMMANDS:
            yield from _retyped(data)


def _retyped(data: bytes) -> Iterator[bytes]:
    """One of its fields is of a type that no field has."""
    plain = msgspec.msgpack.decode(data)
    names = range(1, len(plain)) if isinstance(plain, list) else [k for k in plain if k != "type"]
    for name in list(names)[:1]:
        plain[name] = {"a": [{"b": msgspec.msgpack.Ext(5, b"x")}]}
        yield msgspec.msgpack.encode(plain)


def well_formed() -> Iterator[bytes]:
    """Messages that decode and have no business here, and of newer versions."""
    for name, data in golden():
        if name not in COMMANDS:
            yield data
    newer = msgspec.msgpack.decode(codec.encode(Ping())) | {"added_in_9_9": [{"a": 2}] * 100}
    yield msgspec.msgpack.encode(newer)
    beat = msgspec.msgpack.decode((GOLDEN / "Beat.0.1.0.msgpack").read_bytes())
    yield msgspec.msgpack.encode(beat | {"protocol": PROTOCOL + 1})
    yield msgspec.msgpack.encode(beat | {"sequence": 2**63 - 1, "interval_s": 1e308})
