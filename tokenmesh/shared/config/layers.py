"""Sources of settings: values from flags, environment and file, their spelling, and all keys."""

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, SettingsError

from tokenmesh.shared.config.fixed import MOVED, is_fixed
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.settings import ENV_DELIMITER, ENV_PREFIX, Settings
from tokenmesh.shared.errors import ConfigError

Location = tuple[str | int, ...]
"""Path of a key, such as ("gateway", "port")."""

_OBJECT: Final = "speculative_config"
_VLLM_KEY: Final = "VLLM_API_KEY"
_VLLM_SWITCHES: Final = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")

MODEL: Final = "model"
"""Shorthand section for a mesh with one model: [model] in a file, TOKENMESH_MODEL__* outside."""


@dataclass(frozen=True)
class Layer:
    """One source's values, nested by section, and its spelling of a key in error messages."""

    values: Mapping[str, Any]
    spell: Callable[[Location], str]


def flag_layer(values: Mapping[str, Any]) -> Layer:
    """Values of the command line."""
    return Layer(values, _flag_name)


def _flag_name(location: Location) -> str:
    """A flag is spelled like the last part of its key; keys of an object that is one flag follow
    that with a dot."""
    for place, part in enumerate(location):
        if part == _OBJECT:
            name, *keys = map(str, location[place:])
            return ".".join((f"--{name.replace('_', '-')}", *keys))
    return f"--{_dotted(location[-1:]).replace('_', '-')}"


def file_layer(path: Path) -> Layer:
    """A TOML file, or JSON when the name ends in .json. Raises ConfigError."""
    try:
        raw = path.read_bytes()
        is_json = path.suffix == ".json"
        values = json.loads(raw) if is_json else tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param=str(path)) from error
    except ValueError as error:
        raise ConfigError(f"{path} does not parse: {error}", param=str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a table of sections", param=str(path))
    return Layer(values, lambda location: f"{_dotted(location)} in {path}")


def environment_layer() -> Layer:
    """The TOKENMESH_<SECTION>__<FIELD> variables; an empty one counts as absent.

    Lists are JSON or separated by commas.
    """
    try:
        values = _Environment(_Layout)()
    except SettingsError as error:
        raise ConfigError(f"{ENV_PREFIX}*: {error.__cause__ or error}") from error
    for name, text in os.environ.items():
        section = name.removeprefix(ENV_PREFIX).lower()
        is_ours = name.startswith(ENV_PREFIX) and text
        if is_ours and section.partition(ENV_DELIMITER)[0] not in values:
            values[section] = text
    return Layer(values, environment_name)


def vllm_keys() -> tuple[str, ...]:
    """The hash of the API key that vLLM would read from the environment; none without one."""
    key = os.environ.get(_VLLM_KEY)
    return (hashlib.sha256(key.encode()).hexdigest(),) if key else ()


def vllm_admin() -> str | None:
    """The variable of vLLM's that turns on routes which are ours for admins; None: none does."""
    for name in _VLLM_SWITCHES:
        if os.environ.get(name, "").strip().lower() in ("1", "true"):
            return name
    return None


def environment_name(location: Location) -> str:
    """The variable that sets a key."""
    return ENV_PREFIX + ENV_DELIMITER.join(str(part).upper() for part in location)


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


class _Layout(Settings):
    """The sections as sources may write them."""

    model: ModelSettings | None = None


class _Environment(EnvSettingsSource):
    """Reads lists that are separated by commas, too."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """JSON, or for anything that does not look like it the parts between commas."""
        text = str(value).strip()
        if text[:1] in ("[", "{"):
            return cast(Any, super().decode_complex_value(field_name, field, text))
        return [part.strip() for part in text.split(",") if part.strip()]


Key = tuple[str, ...]


def fields() -> Iterator[tuple[Key, FieldInfo]]:
    """Every key that sources may set: sections before their fields, `model` for a single model
    last."""
    return ((key, field) for key, field in _every_field() if not is_fixed(field))


@cache
def constants() -> Mapping[Key, object]:
    """The values of keys that no source may set; None where the value is not in a section."""
    moved = {tuple(key.split(".")): None for key in MOVED}
    return moved | {key: field.default for key, field in _every_field() if is_fixed(field)}


def _every_field() -> Iterator[tuple[Key, FieldInfo]]:
    yield from _fields_of(Settings, ())
    yield from _fields_of(ModelSettings, (MODEL,))


def field_at(key: Key) -> FieldInfo:
    """The field behind a key; KeyError when there is none."""
    return _by_key()[key]


@cache
def _by_key() -> Mapping[Key, FieldInfo]:
    return dict(fields())


def is_section(field: FieldInfo) -> bool:
    """Return whether a field holds further fields."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _fields_of(section: type[BaseModel], path: Key) -> Iterator[tuple[Key, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield (*path, name), field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields_of(field.annotation, (*path, name))
