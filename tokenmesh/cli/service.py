"""One service in this process, without the libraries of the command line, which would stay."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.config import Settings, load_settings
from tokenmesh.shared.errors import ConfigError, TokenMeshError
from tokenmesh.shared.lifecycle import ExitCode
from tokenmesh.shared.services import SERVICE_BY_NAME, ServiceSpec

_CONFIG: Final = "--config"


def is_plain(words: Sequence[str]) -> bool:
    """Return whether a command line is the one with which `up` starts a service."""
    return len(words) == 4 and words[0] == "serve" and words[2] == _CONFIG


def run_plain(words: Sequence[str]) -> int:
    """Run such a command line; the exit code."""
    try:
        return run_service(words[1], Path(words[3]), {})
    except TokenMeshError as error:
        print(f"tokenmesh: {error.message}", file=sys.stderr)  # noqa: T201
        return ExitCode.BAD_CONFIG


def run_service(service: str, config: Path | None, overrides: dict[str, Any]) -> int:
    """Run it until a signal ends it; the exit code. Raises ConfigError."""
    spec = SERVICE_BY_NAME.get(service)
    if spec is None:
        raise ConfigError(
            f"{service} is not a service ({', '.join(SERVICE_BY_NAME)}); "
            f"to serve a model use `tokenmesh up {service}`",
            param="SERVICE",
        )
    return _entry(spec)(load_settings(config, overrides))


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
