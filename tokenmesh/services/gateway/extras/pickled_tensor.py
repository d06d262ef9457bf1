"""What `torch.save` says of one tensor, read from its pickle without unpickling.

A pickle is a program; here its operations are looked at one by one, and those few that a plain
tensor is written with build inert records. Nothing is imported, called or constructed.
"""

import pickletools
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

MAX_BYTES: Final = 16 * 1024
"""A tensor's description has a few hundred."""


class Name(NamedTuple):
    """Something importable, by name."""

    module: str
    name: str


class PickledReference(NamedTuple):
    """What torch keeps beside the pickle."""

    facts: Any


class PickledCall(NamedTuple):
    """What would be called, with what."""

    function: Any
    arguments: Any


@dataclass(frozen=True, slots=True)
class Description:
    """Where a tensor lies in its storage."""

    storage_type: str
    """Such as FloatStorage."""
    key: str
    """The storage's file."""
    offset: int
    """Elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_MARK: Final = object()
_NUMBERS: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"})
_TUPLES: Final = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS: Final = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}
_REBUILD: Final = Name("torch._utils", "_rebuild_tensor_v2")


def describe(data: bytes) -> Description:
    """Raises ValueError for whatever is not exactly one tensor."""
    if len(data) > MAX_BYTES:
        raise ValueError("it holds more than one tensor")
    match _interpret(data):
        case PickledCall(
            function,
            (
                PickledReference(("storage", Name("torch", storage_type), str(key), str(), int())),
                int(offset),
                tuple(shape),
                tuple(strides),
                bool(),
                PickledCall(Name("collections", "OrderedDict"), ()),
            ),
        ) if function == _REBUILD and all(type(n) is int for n in (*shape, *strides)):
            return Description(storage_type, key, offset, shape, strides)
    raise ValueError("it holds something else than one plain tensor")


def _interpret(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name == "STOP":
                return stack.pop()
            _apply(operation.name, argument, stack, memo)
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError("its description is broken") from error
    raise ValueError("its description has no end")


def _apply(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in ("PROTO", "FRAME"):
        return
    if name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in _NUMBERS:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name == "GLOBAL":
        stack.append(Name(*argument.split(" ", 1)))
    elif name == "MARK":
        stack.append(_MARK)
    elif name == "TUPLE":
        start = len(stack) - 1 - stack[::-1].index(_MARK)
        stack[start:] = [tuple(stack[start + 1 :])]
    elif name in _TUPLES:
        start = len(stack) - _TUPLES[name]
        stack[start:] = [tuple(stack[start:])]
    elif name == "BINPERSID":
        stack.append(PickledReference(stack.pop()))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(PickledCall(stack.pop(), arguments))
    else:
        raise ValueError(f"it holds a {name}, which no plain tensor has")
