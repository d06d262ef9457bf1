"""Quantization: the format of each module, by patterns of names."""

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.kernels.linear.formats import Format

ALL: Final = re.compile("")
"""Matches every module."""


class Modules(Protocol):
    """Some modules by their names, such as an expression that matches the beginning of a name."""

    def match(self, module: str, /) -> object:
        """Truthy where the module is one of them."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Modules with one of these names, all within them and all whose names end with one of them."""

    names: tuple[str, ...]

    def match(self, module: str, /) -> object:
        """Return whether a module is one of them; fast, as lists often have hundreds of names."""
        ending = module.endswith(self.names)
        return ending or module.startswith(tuple(f"{name}." for name in self.names))


@dataclass(frozen=True, slots=True)
class Named:
    """Modules with one of these names."""

    names: frozenset[str]

    def match(self, module: str, /) -> object:
        """Return whether a module is one of them."""
        return module in self.names


Rule = tuple[Modules, Format | None]
"""Modules and their format; None: not quantized."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """It holds what a checkpoint's configuration says of its weights."""

    origin: str
    """File and key that say so."""
    rules: tuple[Rule, ...]
    """The first that matches a module counts."""
    unapplied: frozenset[str] = frozenset()
    """Last names of tensors that only quantized activations, keys and values need."""
    stacks: Format | None = None
    """Format of experts in one tensor, whose parts have names such as `down_proj_blocks`."""
    method: str = ""
    """It holds what the configuration calls it."""

    def format_of(self, module: str) -> Format | None:
        """The format of a module; None: not quantized."""
        return next((form for pattern, form in self.rules if pattern.match(module)), None)

    def unapplied_of(self, tensors: Iterable[str]) -> frozenset[str]:
        """Those of the tensors whose last name is one of `unapplied`."""
        return frozenset(name for name in tensors if name.rpartition(".")[2] in self.unapplied)


def names(raw: RawConfig, key: str) -> list[str]:
    """A list of strings; empty if there is none."""
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise raw.error(key, "is not a list of names")
    return value


def expression(raw: RawConfig, key: str, text: str) -> re.Pattern[str]:
    """Raises CheckpointError for what is not a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise raw.error(key, f"has {text!r}, which is not a regular expression: {error}") from error


def exact(name: str) -> re.Pattern[str]:
    """Matches the one module."""
    return re.compile(rf"{re.escape(name)}\Z")


def wildcards(raw: RawConfig, key: str) -> list[Modules]:
    """Patterns of names with `*` and `?`, as modelopt writes them; a name includes all under it."""
    found = names(raw, key)
    under = [re.compile(fnmatch.translate(f"{each}.*")) for each in found]
    return [*(re.compile(fnmatch.translate(each)) for each in found), *under]


def skipped(raw: RawConfig, key: str) -> list[Modules]:
    """As transformers reads `modules_to_not_convert`: beginnings, endings and expressions."""
    found = names(raw, key)
    special = [each for each in found if re.search(r"[^\w.-]", each)]
    ending = r"(?:(?<=\.)|(?=\.|\Z))"
    return [
        Paths(tuple(found)),
        *(expression(raw, key, f"(?:{each}){ending}") for each in special),
    ]


def plain(patterns: Iterable[Modules]) -> tuple[Rule, ...]:
    """Rules for modules that are not quantized."""
    return tuple((pattern, None) for pattern in patterns)


def choose(raw: RawConfig, key: str, *supported: Any, fallback: Any = None) -> Any:
    """A value out of those supported. Raises CheckpointError that names the key."""
    value = raw.get(key)
    value = fallback if value is None else value
    # True is 1 in Python
    if not any(value == each and type(value) is type(each) for each in supported):
        known = ", ".join(repr(each) for each in supported)
        raise raw.error(key, f"is {value!r}; supported is {known}")
    return value


def refuse_unknown(raw: RawConfig, harmless: Iterable[str]) -> None:
    """Raise CheckpointError for a key that is set, was not read and is not known to be harmless."""
    for key, value in raw.values.items():
        if key not in raw.read and key not in harmless and value is not None:
            raise raw.error(key, f"is {value!r}, which is not known: it may change the weights")
