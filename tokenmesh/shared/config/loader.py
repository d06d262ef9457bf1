"""load_settings: flags over environment over file over defaults, and errors that name the source.

An unknown key is an error in every source. A wrong value is never replaced by a default.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr, ValidationError

import tokenmesh
from tokenmesh.shared.config.complaints import complain
from tokenmesh.shared.config.layers import (
    MODEL,
    Layer,
    environment_layer,
    file_layer,
    flag_layer,
    vllm_keys,
)
from tokenmesh.shared.config.settings import Settings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_KEYS: Final = frozenset(("api_key_hashes", "keys_file"))

DEMO_MODEL: Final = Path(tokenmesh.__file__).parent / "demo_model"
DEMO_MODEL_NAME: Final = "tokenmesh-demo"


def load_settings(
    config_file: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """The settings of this process.

    `overrides` are the flags, nested by section: {"gateway": {"port": 8001}}. Every source may
    write the section `model` instead of the list `models` when there is one model; its fields
    lie over those of the sources below. No model at all means the demo model.
    Raises ConfigError that names key and source.
    """
    layers = [flag_layer(overrides or {}), environment_layer()]
    if config_file is not None:
        layers.append(file_layer(config_file))
    merged = _merge(layers)
    if len(merged.get("models") or [{}]) == 1:
        merged["models"] = [_demo_unless_named(*(merged.get("models") or [{}]))]
    _guard_like_vllm(merged)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise complain(error, layers) from error


def _guard_like_vllm(merged: dict[str, Any]) -> None:
    """A key in VLLM_API_KEY guards the API when no source says anything about keys."""
    gateway = merged.get("gateway", {})
    if not isinstance(gateway, Mapping) or not _KEYS.isdisjoint(gateway):
        return
    if hashes := vllm_keys():
        logger.warning("VLLM_API_KEY is used as the API key: --api-key takes its place")
        merged["gateway"] = {**gateway, "api_key_hashes": hashes}


def _demo_unless_named(model: Any) -> Any:
    """The demo model takes the settings of a model that names no checkpoint."""
    if not isinstance(model, Mapping) or "model" in model:
        return model
    return {"served_model_name": (DEMO_MODEL_NAME,), **model, "model": str(DEMO_MODEL)}


def plain_values(settings: Settings) -> dict[str, Any]:
    """Settings as JSON-able values with secrets in clear, for a file that only its owner reads."""
    return _reveal(settings.model_dump(mode="python"))  # type: ignore[no-any-return]


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """A copy in which these values, nested by section, are laid over the others."""
    # What was left to its default stays so: `up` starts a server whose URL nobody set.
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
        values = dict(layer.values)
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
        raise ConfigError(f"{key} is unclear: several models are configured", param=key)
    below = models[0] if models and isinstance(models[0], Mapping) else {}
    return [{**below, **values}]
