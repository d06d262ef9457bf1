"""The batch language: what an op is given, in a few letters.

    q2k           one sequence of 2,048 new tokens: a prefill
    8q1s4k        8 sequences of one new token, each with 4,096 keys in all: a decode step
    q512s4k       512 new tokens on top of 3,584 earlier ones
    q512_8q1s4k   both together

`k` is 1,024. The context after `s` counts the new tokens too and is theirs alone if left out.
"""

import re
from dataclasses import dataclass
from typing import Final

MAX_TOKENS: Final = 1 << 24
"""The most tokens of one batch, context included: a slip of the pen should not fill the memory."""

_GROUP: Final = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")
_HELP: Final = "a group is [sequences]q<new tokens>[s<context>], as in q2k, 8q1s4k, q512_8q1s4k"


class BatchError(ValueError):
    """The text is not a batch; the message names the part and why."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of the same size."""

    count: int
    query: int
    """New tokens of each."""
    context: int
    """Keys of each when its last new token is computed."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step, those with the fewest new tokens first."""

    text: str
    groups: tuple[Group, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return sum(group.count * group.query for group in self.groups)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(new tokens, context) of each sequence."""
        return [(group.query, group.context) for group in self.groups for _ in range(group.count)]


def parse_batch(text: str) -> Batch:
    """Raises BatchError."""
    groups = sorted((_group(part, text) for part in text.split("_")), key=lambda each: each.query)
    if sum(group.count * group.context for group in groups) > MAX_TOKENS:
        raise BatchError(f"{text!r} holds more than {MAX_TOKENS} tokens")
    return Batch(text, tuple(groups))


def _group(part: str, text: str) -> Group:
    found = _GROUP.fullmatch(part)
    if found is None:
        raise BatchError(f"{part!r} in {text!r} is not a group of sequences: {_HELP}")
    count = int(found[1] or 1)
    query = _number(found[2], found[3])
    context = _number(found[4], found[5]) if found[4] else query
    if count < 1 or query < 1:
        raise BatchError(f"{part!r} in {text!r}: sequences and new tokens are at least 1")
    if context < query:
        raise BatchError(
            f"{part!r} in {text!r}: the context of {context} must hold the {query} new tokens"
        )
    return Group(count, query, context)


def _number(digits: str, unit: str) -> int:
    return int(digits) * (1024 if unit else 1)
