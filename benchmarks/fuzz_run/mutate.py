"""Changes a body that fits, or its bytes, as a hostile client would."""

import json
from copy import deepcopy
from random import Random
from typing import Any, Final

Json = Any

_MIB: Final = 1024 * 1024
_ODD: Final[tuple[Json, ...]] = (
    None,
    True,
    -1,
    2**63,
    10**400,
    1e308,
    0.5,
    "",
    "\x00",
    "9" * 5000,
    "<|im_end|>" * 50,
    "{" * 2000,
    "(a{" * 1000,
    "a{1000}{1000}{1000}",
    "data:image/png;base64,AAAA",
    [],
    {},
    [[[[[]]]]],
    [None] * 100,
    {"$ref": "#"},
)
_ELEMENTS: Final[tuple[Json, ...]] = (-1, 1, "a", None, {}, [], {"role": "user", "content": "a"})
_LARGE_SHARE: Final = 0.04
"""The share of mutations that make a body large: each takes the attacker longer than the server."""


def mutate(value: Json, random: Random, max_bytes: int) -> Json:
    """A copy with one to three places changed; some become as large as `max_bytes` allows."""
    changed: Json = json.loads(json.dumps(value))
    for _ in range(random.randint(1, 3)):
        places = _places(changed)
        if not places:
            return deepcopy(random.choice(_ODD))
        holder, key = random.choice(places)
        if random.random() < _LARGE_SHARE:
            holder[key] = _large(random, max_bytes)
        elif isinstance(holder, dict) and random.random() < 0.2:
            del holder[key]
        elif isinstance(holder, dict) and random.random() < 0.1:
            holder[f"{key}_more"] = deepcopy(random.choice(_ODD))
        else:
            holder[key] = deepcopy(random.choice(_ODD))
    return changed


def _places(value: Json) -> list[tuple[Json, Any]]:
    """Every (container, key) of a value."""
    found: list[tuple[Json, Any]] = []
    level = [value]
    while level:
        node = level.pop()
        pairs: list[tuple[Any, Json]] = []
        if isinstance(node, dict):
            pairs = [*node.items()]
        elif isinstance(node, list):
            pairs = [*enumerate(node)]
        found += [(node, key) for key, _ in pairs]
        level += [each for _, each in pairs]
    return found


def _large(random: Random, max_bytes: int) -> Json:
    size = int(random.choice((0.1, 0.5, 0.95)) * max_bytes)
    if random.random() < 0.3:
        return random.choice(("a", "a ", "[", '"', "\\", "{1")) * (size // 4)
    element = random.choice(_ELEMENTS)
    return [element] * (size // (len(json.dumps(element)) + 2))


def spoil(data: bytes, random: Random) -> bytes:
    """Bytes of a message with some lost, changed or added."""
    kind = random.randrange(6)
    at = random.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + random.randbytes(random.choice((1, 4, 64))) + data[at:]
    if kind == 2:
        return data[:at] + bytes((random.randrange(256),)) + data[at + 1 :]
    if kind == 3:
        return data[:at] + random.choice((b'"', b"[", b"{", b"\\", b"\xff")) * 3000 + data[at:]
    if kind == 4:
        return data + data
    return random.randbytes(random.choice((0, 1, 100, 5000)))
