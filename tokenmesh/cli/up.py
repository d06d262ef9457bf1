"""`tokenmesh up`: the whole mesh on this machine."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tokenmesh.cli.demo import name_demo
from tokenmesh.cli.embedded.run import run_mesh
from tokenmesh.cli.embedded.screen import Screen
from tokenmesh.cli.flags import name_models
from tokenmesh.shared.config import load_settings


def up(
    model_tags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Local directories or hub ids of checkpoints; default: the bundled demo model.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what the services log.")
    ] = False,
    demo: Annotated[
        str | None,
        typer.Option(help="A demo model: chat (bundled) or embeddings (all-MiniLM-L6-v2)."),
    ] = None,
    ready_fd: Annotated[
        int | None, typer.Option(hidden=True, help="Write a byte to it when the mesh is ready.")
    ] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Serve models: NATS, Redis and all services on this machine. Ctrl-C ends them."""
    name_models(overrides, model_tags or ())
    if demo is not None:
        name_demo(overrides, demo)
    settings = load_settings(config, overrides)
    # The services report what happens to the bus: this process need not repeat it.
    logging.getLogger("tokenmesh").addHandler(logging.NullHandler())
    screen = Screen(Console(highlight=False), is_verbose=verbose)
    raise typer.Exit(asyncio.run(run_mesh(settings, screen, ready_fd)))
