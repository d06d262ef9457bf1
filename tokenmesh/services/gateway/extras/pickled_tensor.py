"""Reads the description of one tensor from a file of `torch.save` without unpickling it.

A pickle is a program. Only the few operations of a plain tensor are accepted, and they make inert
records: nothing is imported, called or constructed.
"""

import pickletools
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

MAX_BYTES: Final = 16 * 1024
"""The description of one tensor has a few hundred bytes."""


class PickledName(NamedTuple):
    """The name of something importable."""

    module: str
    name: str


class PickledReference(NamedTuple):
    """A reference to data outside the pickle."""

    facts: Any


class PickledCall(NamedTuple):
    """A call that unpickling would make."""

    function: Any
    arguments: Any


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """Where a tensor lies in its storage."""

    storage_type: str
    """Such as FloatStorage."""
    key: str
    """The name of the storage's file."""
    offset: int
    """In elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_MARK: Final = object()
_NUMBERS: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"})
_TUPLES: Final = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS: Final = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}
_REBUILD: Final = PickledName("torch._utils", "_rebuild_tensor_v2")


def describe(data: bytes) -> TensorDescription:
    """Raises ValueError for anything but exactly one tensor."""
    if len(data) > MAX_BYTES:
        raise ValueError("it holds more than one tensor")
    match _interpret(data):
        case PickledCall(
            function,
            (
                PickledReference(
                    ("storage", PickledName("torch", storage_type), str(key), str(), int())
                ),
                int(offset),
                tuple(shape),
                tuple(strides),
                bool(),
                PickledCall(PickledName("collections", "OrderedDict"), ()),
            ),
        ) if function == _REBUILD and all(type(n) is int for n in (*shape, *strides)):
            return TensorDescription(storage_type, key, offset, shape, strides)
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
        stack.append(PickledName(*argument.split(" ", 1)))
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
