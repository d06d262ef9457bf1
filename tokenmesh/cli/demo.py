"""Chooses the model of `tokenmesh up` without an argument, and the models of `--demo`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console

from tokenmesh.cli.flags import name_models
from tokenmesh.cli.pulling import pull_model
from tokenmesh.shared.catalog import BUILT_IN, CATALOG, DEFAULT, CatalogModel
from tokenmesh.shared.config.loader import DEMO_MODEL
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import ConfigError

_EMBEDDER: Final = "minilm"
_LISTENER: Final = "whisper-base"
ALIASES: Final[Mapping[str, str]] = {"demo-embeddings": _EMBEDDER}
"""Names that `tokenmesh pull` had for models of the catalog."""


def default_model() -> str:
    """The model that answers questions where it was pulled, else the one in this package."""
    return DEFAULT if CATALOG[DEFAULT].is_here else BUILT_IN


def name_demo(overrides: dict[str, Any], demo: str) -> None:
    """Serve the models of a demo. Raises ConfigError where another model is named, too."""
    demos = {"chat": [default_model()], "embeddings": [_EMBEDDER], "transcription": [_LISTENER]}
    demos["all"] = [DEFAULT, _EMBEDDER, _LISTENER]
    if demo not in demos:
        raise ConfigError(f"--demo is {demo!r}; it is one of {', '.join(demos)}", param="--demo")
    named = overrides.get("model", {}).get("model") or overrides.get("models")
    if named:
        raise ConfigError(f"--demo {demo} and another model are named", param="--demo")
    name_models(overrides, demos[demo])


def pull_missing(models: Sequence[ModelSettings], console: Console) -> bool:
    """Download what is named by the catalog and is not here; whether there was any.

    Raises ConfigError, also for terms that are not accepted yet.
    """
    missing = [CATALOG[model.model] for model in models if model.model in CATALOG]
    for model in missing:
        if model.terms and not model.is_here:
            raise ConfigError(unaccepted(model), param="--accept-terms")
        pull_model(model, console)
    return bool(missing)


def unaccepted(model: CatalogModel) -> str:
    """Say what is to be done about terms that were not accepted."""
    return (
        f"{model.full_name} is under the {model.licence}, {model.terms}: read them, and accept "
        f"them with `tokenmesh pull {model.name} --accept-terms`. Nothing was downloaded"
    )


def hint(models: Sequence[ModelSettings]) -> str | None:
    """Say how to get another model, where the one in this package is served."""
    if default_model() == DEFAULT or [model.model for model in models] != [str(DEMO_MODEL)]:
        return None
    model = CATALOG[DEFAULT]
    return (
        f"serving the built-in {BUILT_IN}, which does sums: `tokenmesh pull {DEFAULT}` downloads "
        f"{model.full_name} ({model.download_bytes / 1e6:.0f} MB), which is served from then on"
    )
