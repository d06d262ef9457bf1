"""`tokenmesh serve`: one service in this process."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmesh.shared.config import Settings, load_settings
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.services import SERVICE_BY_NAME, ServiceSpec


def serve(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help=" | ".join(SERVICE_BY_NAME))],
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Run one service of the mesh until a signal ends it."""
    spec = SERVICE_BY_NAME.get(service)
    if spec is None:
        raise ConfigError(
            f"{service} is not a service ({', '.join(SERVICE_BY_NAME)}); "
            f"to serve a model use `tokenmesh up {service}`",
            param="SERVICE",
        )
    settings = load_settings(config, overrides)
    raise typer.Exit(_entry(spec)(settings))


def _entry(spec: ServiceSpec) -> Callable[[Settings], int]:
    """The service's `run`. Only its own libraries are loaded: a gateway needs no torch."""
    try:
        module = importlib.import_module(spec.module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("tokenmesh"):
            raise
        raise ConfigError(
            f"the {spec.name} needs {error.name}: install tokenmesh-server with its extra "
            f"`{spec.name}`, or with `cpu`, which has all services"
        ) from error
    run: Callable[[Settings], int] = module.run
    return run
