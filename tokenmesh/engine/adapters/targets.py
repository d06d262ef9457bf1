"""Know which modules and parameters an adapter's config chooses, as PEFT chooses them when it loads
one.

PEFT leaves tensors of other modules unused, whatever the file holds.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenmesh.engine.adapters.name_pattern import (
    NamePattern,
    Steps,
    UnusablePattern,
)

_ALL: Final = "all-linear"
"""PEFT's word for every linear layer."""
_FIRST_INDEX: Final = re.compile(r".*?\.[^.]*\.(\d+)\.")
_WORD: Final = re.compile(r"[\w-]+")
_CHOICES: Final = frozenset("|*+?{")
_MAX_SAVED: Final = 4096
"""Expressions among the names of modules that are saved whole."""
_INDEX: Final = re.compile(r"(?<=\.)(\d+)(?=\.)")

Names = tuple[str, ...] | NamePattern
"""Ends of names, or an expression for a whole one."""


class BadTarget(ValueError):
    """A key of the config that cannot be served."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Targets:
    """It holds what a config chooses. Names are paths in the tree, as PEFT has written them."""

    modules: Names | None = None
    """None: all."""
    excluded: Names = ()
    saved: frozenset[str] = frozenset()
    """Parts of paths: what is at or within such a module is saved whole and not adapted."""
    saved_patterns: tuple[NamePattern, ...] = ()
    """The same as expressions for whole paths."""
    layers: frozenset[int] | None = None
    """Only these, where `modules` are ends of names."""
    layer_patterns: tuple[NamePattern, ...] = ()
    """It holds what stands before the number of a layer; none: any two names."""
    parameters: tuple[str, ...] | None = None
    """Ends of names of parameters; None: all."""

    def has_module(self, name: str) -> bool:
        """Raises BadTarget where an expression takes too long."""
        if _is_one_of("exclude_modules", self.excluded, name):
            return False
        if self._is_saved(name):
            return False
        if self.modules is None:
            return True
        if not _is_one_of("target_modules", self.modules, name):
            return False
        if self.layers is None or isinstance(self.modules, NamePattern) or name in self.modules:
            # one that is named in full is chosen whatever its layer
            return True
        return self._layer_of(name) in self.layers

    def has_parameter(self, name: str) -> bool:
        return self.parameters is None or _is_one_of("target_parameters", self.parameters, name)

    def _is_saved(self, name: str) -> bool:
        if not self.saved.isdisjoint(name.split(".")):
            return True
        return any(_matches("modules_to_save", each, name) for each in self.saved_patterns)

    def _layer_of(self, name: str) -> int | None:
        """The number of its layer: the first one in its path that stands behind a pattern."""
        if not self.layer_patterns:
            found = _FIRST_INDEX.match(name)
            return None if found is None else int(found[1])
        for pattern in self.layer_patterns:
            for number in _INDEX.finditer(name):
                if _matches("layers_pattern", pattern, name[: number.start() - 1]):
                    return int(number[1])
        return None


ANY_MODULE: Final = Targets()


def read_targets(raw: Mapping[str, Any], saved: Sequence[str], steps: Steps) -> Targets:
    """Raises BadTarget that names the key. saved: what `modules_to_save` names."""
    layers = raw.get("layers_to_transform")
    numbers = [layers] if isinstance(layers, int) else layers or None
    if numbers is not None and not _is_list(numbers, int):
        raise BadTarget("layers_to_transform", "is not a list of numbers")
    patterns = raw.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not _is_list(patterns, str) or any(_CHOICES & {*each} for each in patterns):
        # of several places where it matches, PEFT takes the one that its search meets first
        problem = "is not a list of names without alternatives and repetitions"
        raise BadTarget("layers_pattern", problem)
    modules = raw.get("target_modules")
    parameters = raw.get("target_parameters")
    if parameters is not None and not _is_list(parameters, str):
        raise BadTarget("target_parameters", "is not a list of names")
    chosen = None if modules in (None, _ALL) else _names("target_modules", modules, steps)
    return Targets(
        modules=() if modules is None and parameters else chosen,
        excluded=_names("exclude_modules", raw.get("exclude_modules") or [], steps),
        saved=frozenset(filter(_WORD.fullmatch, saved)),
        saved_patterns=tuple(_saved_patterns(saved, steps)),
        layers=None if numbers is None else frozenset(numbers),
        layer_patterns=tuple(
            _pattern("layers_pattern", rf"(?:^|.*?\.){each}", steps) for each in patterns
        ),
        parameters=None if parameters is None and modules is None else tuple(parameters or ()),
    )


def _saved_patterns(saved: Sequence[str], steps: Steps) -> Iterator[NamePattern]:
    others = [each for each in saved if not _WORD.fullmatch(each)]
    if len(others) > _MAX_SAVED:
        raise BadTarget("modules_to_save", f"has {len(others)} expressions")
    for each in others:
        yield _pattern("modules_to_save", rf"(^|.*\.){each}($|\..*)", steps)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _names(key: str, value: object, steps: Steps) -> Names:
    if isinstance(value, str):
        return _pattern(key, value, steps)
    if not _is_list(value, str):
        raise BadTarget(key, "is neither a list of names nor an expression")
    return tuple(value)  # type: ignore[arg-type]


def _pattern(key: str, text: str, steps: Steps) -> NamePattern:
    try:
        return NamePattern(text, steps)
    except UnusablePattern as error:
        raise BadTarget(key, f"is an expression that {error}") from error


def _is_one_of(key: str, names: Names, name: str) -> bool:
    if isinstance(names, NamePattern):
        return _matches(key, names, name)
    return any(name == each or name.endswith(f".{each}") for each in names)


def _matches(key: str, pattern: NamePattern, name: str) -> bool:
    try:
        return pattern.fullmatch(name)
    except UnusablePattern as error:
        raise BadTarget(key, f"is an expression that {error}") from error
