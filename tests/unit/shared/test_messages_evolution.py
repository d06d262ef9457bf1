"""Yesterday's bytes decode today, and today's messages keep the rules that let them."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec.structs import fields

from tokenmesh.shared import codec
from tokenmesh.shared.messages import Message, Tokens

GOLDEN = Path(__file__).parent / "golden"
TYPES: tuple[type[msgspec.Struct], ...] = (*get_args(Message), Tokens)
FILES = sorted(GOLDEN.glob("*.msgpack"))


def nested(kind: object) -> Iterator[type[msgspec.Struct]]:
    """Every struct type that a type is made of, itself included."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in fields(kind):
            yield from nested(field.type)
    for argument in get_args(kind):
        yield from nested(argument)


def wire_name(kind: type[msgspec.Struct]) -> str:
    """The tag under which a type travels; types without one go by their class."""
    return str(kind.__struct_config__.tag or kind.__name__)


STRUCTS = sorted({each for kind in TYPES for each in nested(kind)}, key=wire_name)


def carries(new: object, old: object) -> bool:
    """Return whether `new` is `old`, but for empty fields at the end: arrays may grow."""
    if isinstance(new, list) and isinstance(old, list):
        pairs = zip(new, old, strict=False)
        return (
            len(new) >= len(old)
            and all(carries(*each) for each in pairs)
            and (not any(new[len(old) :]))
        )
    if isinstance(new, dict) and isinstance(old, dict):
        return new.keys() == old.keys() and all(carries(new[key], old[key]) for key in old)
    return new == old


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_golden_bytes_decode_and_encode_to_themselves(path: Path) -> None:
    data = path.read_bytes()
    message = codec.decode_any(data)
    assert wire_name(type(message)) == path.name.split(".")[0]
    # a struct that has grown past 15 fields is a map with a longer head
    assert carries(msgspec.msgpack.decode(codec.encode(message)), msgspec.msgpack.decode(data))


@pytest.mark.parametrize("kind", TYPES, ids=wire_name)
def test_every_message_type_has_golden_bytes(kind: type[msgspec.Struct]) -> None:
    assert list(GOLDEN.glob(f"{wire_name(kind)}.*.msgpack")), (
        "run scripts/write_golden_messages.py and commit the new file"
    )


def test_every_golden_file_is_of_a_known_type() -> None:
    assert {path.name.split(".")[0] for path in FILES} == {wire_name(kind) for kind in TYPES}


@pytest.mark.parametrize("kind", STRUCTS, ids=wire_name)
def test_structs_are_frozen_and_maps_omit_defaults(kind: type[msgspec.Struct]) -> None:
    config = kind.__struct_config__
    assert config.frozen
    assert config.array_like or config.omit_defaults


@pytest.mark.parametrize("kind", TYPES, ids=wire_name)
def test_a_field_of_a_newer_version_is_ignored(kind: type[msgspec.Struct]) -> None:
    path = next(GOLDEN.glob(f"{wire_name(kind)}.*.msgpack"))
    plain = msgspec.msgpack.decode(path.read_bytes())
    newer = [*plain, "new"] if isinstance(plain, list) else plain | {"added_in_9_9": [1, {"a": 2}]}
    message = codec.decode_any(msgspec.msgpack.encode(newer))
    assert message == codec.decode_any(path.read_bytes())
