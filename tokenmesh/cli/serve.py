"""`tokenmesh serve`: one service in this process."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmesh.cli.service import run_service
from tokenmesh.shared.services import SERVICE_BY_NAME


def serve(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help=" | ".join(SERVICE_BY_NAME))],
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Run one service of the mesh until a signal ends it."""
    raise typer.Exit(run_service(service, config, overrides))
