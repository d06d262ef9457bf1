"""Regular expressions of an adapter's config, matched against names of modules in bounded time.

A client may name an adapter, and Python's own matcher can take forever on an expression, with the
interpreter locked. Whether an expression matches a name at all needs no backtracking: each part of
it maps the set of places in the name where it may begin to the set of those where it may end. A set
is the bits of an integer. What is left to bound are the steps through nested repetitions, and they
are counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from tokenmesh.shared.clock import sleep_s

# Python's own parser, which its stubs leave out, and names of the parts of its trees.
parser: Any = import_module("re._parser")
codes: Any = import_module("re._constants")

MAX_CHARS: Final = 4096
"""It bounds the characters of an expression."""
MAX_NAME_CHARS: Final = 1024
MAX_STEPS: Final = 1_000_000
"""It bounds the steps of all expressions of one adapter over all of its modules: a few seconds,
when all are taken."""
_STEPS_BETWEEN: Final = 64
"""A millisecond; then another thread may have the interpreter."""

_IS_IN: Final[dict[Any, Callable[[str], bool]]] = {
    codes.CATEGORY_DIGIT: str.isdecimal,
    codes.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    codes.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    codes.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}


class UnusablePattern(ValueError):
    """Its message completes "has the pattern X, which "."""


@dataclass(slots=True)
class Steps:
    """It holds what is left of MAX_STEPS."""

    left: int = MAX_STEPS

    def take(self, count: int = 1) -> None:
        """Raise UnusablePattern when none is left."""
        if self.left // _STEPS_BETWEEN != (self.left - count) // _STEPS_BETWEEN:
            sleep_s(0)
        self.left -= count
        if self.left < 0:
            raise UnusablePattern("takes too long to match")


class NamePattern:
    """An expression; it matches as `re` does, for names without line breaks."""

    def __init__(self, text: str, steps: Steps) -> None:
        """Raises UnusablePattern for a text that is not an expression, and for back references,
        flags, and groups that are atomic or conditional."""
        if len(text) > MAX_CHARS:
            raise UnusablePattern(f"has more than {MAX_CHARS} characters")
        try:
            self._tree: Any = parser.parse(text)
        except (parser.error, OverflowError, RecursionError) as error:
            raise UnusablePattern(f"is not a regular expression: {error}"[:200]) from error
        if self._tree.state.flags & ~codes.SRE_FLAG_UNICODE:
            raise UnusablePattern("has flags, which are not served")
        try:
            _check(self._tree)
        except RecursionError as error:
            raise UnusablePattern("is nested too deeply") from error
        self._steps = steps

    def fullmatch(self, name: str) -> bool:
        """Return whether it matches all of a name. Raises UnusablePattern."""
        if len(name) > MAX_NAME_CHARS:
            raise UnusablePattern(f"meets a name of more than {MAX_NAME_CHARS} characters")
        try:
            ends = _Match(name, self._steps).after(self._tree, 1)
        except RecursionError as error:
            raise UnusablePattern("is nested too deeply") from error
        return bool(ends >> len(name) & 1)


def _check(tree: Any) -> None:
    """Raise UnusablePattern for a part that `_Match` does not follow."""
    for code, given in tree:
        match code:
            case codes.BRANCH:
                for each in given[1]:
                    _check(each)
            case codes.SUBPATTERN if given[1] or given[2]:
                raise UnusablePattern("has flags, which are not served")
            case codes.SUBPATTERN:
                _check(given[3])
            case codes.MAX_REPEAT | codes.MIN_REPEAT:
                _check(given[2])
            case codes.ASSERT | codes.ASSERT_NOT:
                _check(given[1])
            case codes.LITERAL | codes.NOT_LITERAL | codes.ANY | codes.IN | codes.AT:
                pass
            case _:
                raise UnusablePattern(f"has {str(code).lower()}, which is not served")


class _Match:
    """Matches one name. A set of places has bit p for the place before character p."""

    def __init__(self, name: str, steps: Steps) -> None:
        self._name = name
        self._all = (1 << len(name) + 1) - 1
        self._steps = steps
        self._chars: dict[int, int] = {}
        """Places of the characters that a part of the expression takes, by its id."""

    def after(self, tree: Any, places: int) -> int:
        """Where a sequence of parts may end that begins at one of `places`."""
        for part in tree:
            self._steps.take()
            if not places:
                return 0
            places = self._after_part(part, places)
        return places

    def _after_part(self, part: tuple[Any, Any], places: int) -> int:
        code, given = part
        match code:
            case codes.LITERAL | codes.NOT_LITERAL | codes.ANY | codes.IN:
                return (places & self._places_of(part)) << 1
            case codes.BRANCH:
                ends = 0
                for each in given[1]:
                    ends |= self.after(each, places)
                return ends
            case codes.SUBPATTERN:
                return self.after(given[3], places)
            case codes.MAX_REPEAT | codes.MIN_REPEAT:
                return self._repeated(given, places)
            case codes.AT:
                return places & self._anchors(given)
            case codes.ASSERT | codes.ASSERT_NOT:
                return self._seen(given, places, is_wanted=code is codes.ASSERT)
        raise AssertionError(code)

    def _repeated(self, given: tuple[int, int, Any], places: int) -> int:
        # more repetitions than places: one of them takes no character, and any number does
        most = len(self._name) + 1
        least, largest, tree = min(given[0], most), min(given[1], most), given[2]
        for _ in range(least):
            self._steps.take()
            places = self.after(tree, places)
        if largest == most and len(tree) == 1 and tree[0][0] is codes.ANY:
            return self._all & ~((places & -places) - 1) if places else 0
        ends = new = places
        for _ in range(largest - least):
            self._steps.take()
            new = self.after(tree, new) & ~ends
            if not new:
                break
            ends |= new
        return ends

    def _seen(self, given: tuple[int, Any], places: int, *, is_wanted: bool) -> int:
        """The places before or behind which there is, or is not, a match."""
        direction, tree = given
        width = tree.getwidth()[0] if direction < 0 else 0
        kept = 0
        self._steps.take(1 + len(self._name) // 8)
        for place in range(len(self._name) + 1):
            if places >> place & 1:
                first = place - width
                ends = self.after(tree, 1 << first) if first >= 0 else 0
                is_there = bool(ends if direction > 0 else ends >> place & 1)
                kept |= (is_there == is_wanted) << place
        return kept

    def _anchors(self, kind: Any) -> int:
        if kind in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            return 1
        if kind in (codes.AT_END, codes.AT_END_STRING):
            return 1 << len(self._name)
        assert kind in (codes.AT_BOUNDARY, codes.AT_NON_BOUNDARY)
        is_word = _IS_IN[codes.CATEGORY_WORD]
        words = [False, *map(is_word, self._name), False]
        found = sum((words[n] != words[n + 1]) << n for n in range(len(words) - 1))
        return found if kind is codes.AT_BOUNDARY else self._all & ~found

    def _places_of(self, part: tuple[Any, Any]) -> int:
        key = id(part)  # the tree outlives the match
        if key not in self._chars:
            size = len(part[1]) if part[0] is codes.IN else 1
            self._steps.take(1 + len(self._name) * size // 16)
            taken = (_takes(part, char) << place for place, char in enumerate(self._name))
            self._chars[key] = sum(taken)
        return self._chars[key]


def _takes(part: tuple[Any, Any], char: str) -> bool:
    code, given = part
    match code:
        case codes.ANY:
            return char != "\n"
        case codes.LITERAL:
            return bool(ord(char) == given)
        case codes.NOT_LITERAL:
            return bool(ord(char) != given)
        case codes.RANGE:
            return bool(given[0] <= ord(char) <= given[1])
        case codes.CATEGORY:
            return _IS_IN[given](char)
    is_negated = given[0][0] is codes.NEGATE
    return is_negated != any(_takes(each, char) for each in given[is_negated:])
