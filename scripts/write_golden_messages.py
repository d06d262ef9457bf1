"""Write the golden bytes of every message type that has none yet.

A file is written once, with every field set, and never again: it is what a peer of that version
sends. tests/unit/shared/test_messages_evolution.py decodes them all for ever.
"""

import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import fields

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # not the checkout installed

import tokenmesh
from tokenmesh.shared import codec
from tokenmesh.shared.messages import Message, Tokens

GOLDEN = Path(__file__).resolve().parent.parent / "tests/unit/shared/golden"

_SCALARS: dict[object, object] = {str: "text", bytes: b"\x01\x00\x00\x00", int: 7, float: 0.5}


def sample(kind: Any) -> Any:
    """Some value of a field's type that is not its default."""
    kind = getattr(kind, "__supertype__", kind)
    if kind is bool:
        return True
    if kind in _SCALARS:
        return _SCALARS[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return sample_struct(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return arguments[-1]
    if origin is tuple and ... not in arguments:
        return tuple(sample(each) for each in arguments)
    if origin in (list, tuple):
        members = get_args(arguments[0]) if get_origin(arguments[0]) is UnionType else arguments[:1]
        return origin([sample(each) for each in members if each is not NoneType])
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if origin in (Union, UnionType):
        return sample(next(each for each in arguments if each is not NoneType))
    raise TypeError(f"no sample for {kind}")


def sample_struct(kind: type[msgspec.Struct]) -> Any:
    """A struct with every field set."""
    values = {field.name: sample(field.type) for field in fields(kind)}
    return kind(**values)


def main() -> None:
    """Write what is missing."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for kind in (*get_args(Message), Tokens):
        if list(GOLDEN.glob(f"{kind.__struct_config__.tag}.*")):
            continue
        path = GOLDEN / f"{kind.__struct_config__.tag}.{tokenmesh.__version__}.msgpack"
        path.write_bytes(codec.encode(sample_struct(kind)))
        sys.stdout.write(f"wrote {path.name}\n")


if __name__ == "__main__":
    main()
