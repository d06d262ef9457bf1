"""`tokenmesh serve`: one service in this process."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tokenmesh.shared.config import Settings, load_settings
from tokenmesh.shared.errors import ConfigError

PACKAGES: Final = {
    "gateway": "gateway",
    "tokenizer": "tokenizer_svc",
    "encoder": "mm_encoder_svc",
    "scheduler": "scheduler_svc",
    "worker": "worker_svc",
}
"""Service name on the command line -> package below tokenmesh.services."""


def serve(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help=" | ".join(PACKAGES))],
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Run one service of the mesh until a signal ends it."""
    package = PACKAGES.get(service)
    if package is None:
        raise ConfigError(
            f"{service} is no service ({', '.join(PACKAGES)}); "
            f"to serve a model use `tokenmesh up {service}`",
            param="SERVICE",
        )
    settings = load_settings(config, overrides)
    raise typer.Exit(_entry(service, package)(settings))


def _entry(service: str, package: str) -> Callable[[Settings], int]:
    """The service's `run`. Only its own libraries are loaded: a gateway needs no torch."""
    try:
        module = importlib.import_module(f"tokenmesh.services.{package}.main")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("tokenmesh"):
            raise
        raise ConfigError(
            f"the {service} needs {error.name}: run `pip install '.[{service},cli]'` in the folder "
            "of TokenMesh's source"
        ) from error
    run: Callable[[Settings], int] = module.run
    return run
