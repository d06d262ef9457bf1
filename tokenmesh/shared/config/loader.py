"""load_settings: flags over environment over file over defaults, and errors that name the source.

An unknown key is an error in every source. A wrong value is never replaced by a default.
"""

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

import tokenmesh
from tokenmesh.shared.catalog import BUILT_IN, named_fields
from tokenmesh.shared.config.environment import start_date
from tokenmesh.shared.config.layers import (
    MODEL,
    Layer,
    Location,
    constants,
    environment_layer,
    fields,
    file_layer,
    flag_layer,
    vllm_admin,
    vllm_keys,
)
from tokenmesh.shared.config.settings import Settings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_ADMIN: Final = "admin_routes"
_KEYS: Final = frozenset(("api_key_hashes", "keys_file"))

CONSTANTS: Final = "constants"
"""A key of dumps for children, which holds constants that tests have changed."""
DEMO_MODEL: Final = Path(tokenmesh.__file__).parent / "demo_model"


def load_settings(
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    default_model: str = BUILT_IN,
) -> Settings:
    """The settings of this process.

    `overrides` are the flags, nested by section: {"gateway": {"port": 8001}}. Every source may
    write the section `model` instead of the list `models` when there is one model; its fields
    lie over those of the sources below. No model at all means `default_model`; a short name of
    the catalog means its checkpoint and brings the sampling that fits it.
    Raises ConfigError that names key and source.
    """
    layers = [flag_layer(overrides or {}), environment_layer()]
    if config_file is not None:
        layers.append(file_layer(config_file))
    _refuse_constants(layers)
    merged = _merge(layers)
    models = merged.get("models") or [{}]
    if isinstance(models, list | tuple):
        only = default_model if len(models) == 1 else None
        merged["models"] = [_with_name(each, only) for each in models]
    _guard_like_vllm(merged)
    _open_like_vllm(merged)
    start_date()
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise config_error(error, layers) from error


def _refuse_constants(layers: Sequence[Layer]) -> None:
    """Raise ConfigError for keys whose values are constants."""
    lines: dict[str, str] = {}
    for layer in layers:
        for key, value in constants().items():
            if _holds(layer.values, key):
                name, shown = layer.spell(key), "" if value is None else f", {value}"
                lines[name] = f"{name} is not a setting any more: it is a constant{shown}"
    if lines:
        raise ConfigError("\n".join(lines.values()), param=next(iter(lines)))


def _guard_like_vllm(merged: dict[str, Any]) -> None:
    """A key in VLLM_API_KEY guards the API when no source sets keys."""
    gateway = merged.get("gateway", {})
    if not isinstance(gateway, Mapping) or not _KEYS.isdisjoint(gateway):
        return
    if hashes := vllm_keys():
        logger.warning("VLLM_API_KEY is used as the API key: --api-key takes its place")
        merged["gateway"] = {**gateway, "api_key_hashes": hashes}


def _open_like_vllm(merged: dict[str, Any]) -> None:
    """A variable of vLLM's turns on the routes for admins when no source decides it."""
    gateway = merged.get("gateway", {})
    if not isinstance(gateway, Mapping) or _ADMIN in gateway:
        return
    if (name := vllm_admin()) is not None:
        logger.warning("%s is taken as --enable-admin-routes", name)
        merged["gateway"] = {**gateway, _ADMIN: True}


def _with_name(model: Any, default: str | None) -> Any:
    """Return what the name of a model implies lies below the settings that it has."""
    if not isinstance(model, Mapping):
        return model
    name = model.get("model", default)
    if not isinstance(name, str):
        return model
    if name == BUILT_IN and not Path(name).exists():
        return {"served_model_name": (BUILT_IN,), **model, "model": str(DEMO_MODEL)}
    implied = named_fields(name)
    if not implied:
        return {**model, "model": name}
    sampling = implied.pop("override_generation_config")
    given = model.get("override_generation_config", {})
    if model.get("generation_config") != "vllm" and isinstance(given, Mapping):
        model = {**model, "override_generation_config": {**sampling, **given}}
    return {**implied, **model, "model": implied["model"]}


def plain_values(settings: Settings) -> dict[str, Any]:
    """Settings as JSON-able values with secrets in clear, for a file that only its owner reads.

    Constants that code has changed, as tests do, are under the key `CONSTANTS`.
    """
    values: dict[str, Any] = _reveal(settings.model_dump(mode="python"))
    given = settings.model_dump(mode="python", exclude_unset=True)
    for *path, name in constants():
        section, found = values, given
        for part in path:
            section, found = section[part], found.get(part, {})
        value = section.pop(name, None)
        if name in found:
            kept = values.setdefault(CONSTANTS, {})
            for part in path:
                kept = kept.setdefault(part, {})
            kept[name] = value
    return values


def from_plain(values: Mapping[str, Any]) -> Settings:
    """The settings of `plain_values`."""
    return Settings.model_validate(_with_constants(values))


def _with_constants(values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    _lay_over(merged, merged.pop(CONSTANTS, {}))
    return merged


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """A copy in which these values, nested by section, are laid over the others."""
    # Defaults stay unset: `up` starts a server whose URL is not set.
    merged = settings.model_dump(exclude_unset=True)
    _lay_over(merged, values)
    return Settings.model_validate(merged)


def _reveal(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return {key: _reveal(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_reveal(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _merge(layers: Sequence[Layer]) -> dict[str, Any]:
    """The layers' values, the first layer's on top."""
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        values = _with_constants(layer.values)
        one = values.pop(MODEL, None)
        _lay_over(merged, values)
        if one is not None:
            merged["models"] = _lay_over_model(merged.get("models", ()), one, layer)
    return merged


def _lay_over(base: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        below = base.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            copy = dict(below)
            _lay_over(copy, value)
            base[key] = copy
        else:
            base[key] = value


def _lay_over_model(models: Any, values: Any, layer: Layer) -> list[Any]:
    """The one model with some fields set anew."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{layer.spell((MODEL,))} must be a table of model settings")
    if len(models) > 1:
        key = layer.spell((MODEL, next(iter(values), MODEL)))
        raise ConfigError(f"{key} is ambiguous: several models are configured", param=key)
    below = models[0] if models and isinstance(models[0], Mapping) else {}
    return [{**below, **values}]


SECRET_ENDINGS = ("password", "token", "key", "keys", "hashes", "headers", "url")


def config_error(error: ValidationError, layers: Sequence[Layer]) -> ConfigError:
    """One ConfigError for all errors."""
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
    """Return the location of the value; without the member of a union that refuses it, which comes
    last.
    """
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
    """Return how the topmost source that holds the key spells it."""
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
