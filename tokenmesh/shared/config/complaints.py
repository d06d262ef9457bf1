"""Validation errors as sentences: which key of which source, and what would be right."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tokenmesh.shared.config.catalog import fields
from tokenmesh.shared.config.layers import MODEL, Layer, Location
from tokenmesh.shared.errors import ConfigError

SECRET_ENDINGS = ("password", "token", "key", "keys", "hashes", "headers", "url")


def complain(error: ValidationError, layers: Sequence[Layer]) -> ConfigError:
    """One ConfigError for all that is wrong."""
    details = error.errors(include_url=False)
    lines: dict[Location, str] = {}
    for detail in details:
        location = _location_of(detail, layers)
        if location in lines:
            lines[location] += f" or {_wanted(detail)}"
        else:
            lines[location] = _line(detail, location, layers)
    where = _written_at(next(iter(lines)), layers)
    return ConfigError("\n".join(lines.values()), param=where)


def _location_of(detail: ErrorDetails, layers: Sequence[Layer]) -> Location:
    """Of the value; without the member of a union that refuses it, which comes last."""
    location = tuple(detail["loc"])
    if detail["type"] in ("extra_forbidden", "missing") or _is_written(location, layers):
        return location
    return location[:-1] if _is_written(location[:-1], layers) else location


def _is_written(location: Location, layers: Sequence[Layer]) -> bool:
    return any(
        _holds(layer.values, spelled) for spelled in _spellings(location) for layer in layers
    )


def _wanted(detail: ErrorDetails) -> str:
    return detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _line(detail: ErrorDetails, location: Location, layers: Sequence[Layer]) -> str:
    where = _written_at(location, layers)
    if detail["type"] == "extra_forbidden":
        return f"unknown setting {where}{_suggestion(location, layers)}"
    if detail["type"] == "missing":
        return f"{where} is missing"
    return f"{where} = {_shown(detail, location)}: should be {_wanted(detail)}"


def _shown(detail: ErrorDetails, location: Location) -> str:
    """The wrong value, unless it may be a secret."""
    if any(str(part).endswith(SECRET_ENDINGS) for part in location):
        return "(hidden)"
    text = repr(detail["input"])
    return text if len(text) <= 60 else text[:57] + "..."


def _written_at(location: Location, layers: Sequence[Layer]) -> str:
    """How the topmost source that holds the key spells it."""
    for spelled in _spellings(location):
        for layer in layers:
            if _holds(layer.values, spelled):
                return layer.spell(spelled)
    return ".".join(str(part) for part in location)


def _spellings(location: Location) -> Iterator[Location]:
    """A model's key may have been written in the shorthand section."""
    if location[:2] == ("models", 0):
        yield (MODEL, *location[2:])
    yield location


def _holds(values: Any, location: Location) -> bool:
    for part in location:
        if isinstance(values, list | tuple):
            values = dict(enumerate(values))
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _suggestion(location: Location, layers: Sequence[Layer]) -> str:
    """The nearest key: of the same section by name, else of any section."""
    *section, name = location
    keys = [key for key, _ in fields()]
    siblings = {key[-1]: key for key in keys if list(key[:-1]) == _section(section)}
    everywhere = {".".join(key): key for key in keys} | {key[-1]: key for key in keys}
    for candidates, cutoff in ((siblings, 0.6), (everywhere, 0.7)):
        near = difflib.get_close_matches(str(name), candidates, n=1, cutoff=cutoff)
        if near:
            return f"; did you mean {_spell_like(location, candidates[near[0]], layers)}?"
    return ""


def _section(section: Sequence[str | int]) -> list[str]:
    return [MODEL if part == "models" else part for part in section if isinstance(part, str)]


def _spell_like(location: Location, key: tuple[str, ...], layers: Sequence[Layer]) -> str:
    for spelled in _spellings(location):
        for layer in layers:
            if _holds(layer.values, spelled):
                return layer.spell(key)
    return ".".join(key)
