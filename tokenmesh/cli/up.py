"""`tokenmesh up`: the whole mesh on this machine."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tokenmesh.cli.demo import default_model, hint, name_demo, pull_missing
from tokenmesh.cli.embedded.run import run_mesh
from tokenmesh.cli.embedded.screen import Screen
from tokenmesh.cli.flags import name_models
from tokenmesh.shared.config import load_settings


def up(
    model_tags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Directories, GGUF files, hub ids or names of `tokenmesh list`; default: smollm2 "
            "where it was pulled, else the built-in tokenmesh-demo.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what the services log.")
    ] = False,
    demo: Annotated[
        str | None,
        typer.Option(
            help="Models to try: chat, embeddings, transcription, or all of them in one mesh."
        ),
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
    console = Console(highlight=False)
    settings = load_settings(config, overrides, default_model())
    if pull_missing(settings.models, console):
        settings = load_settings(config, overrides)
    # The services report what happens to the bus: this process need not repeat it.
    logging.getLogger("tokenmesh").addHandler(logging.NullHandler())
    screen = Screen(console, is_verbose=verbose)
    if (text := hint(settings.models)) is not None:
        screen.note(text)
    raise typer.Exit(asyncio.run(run_mesh(settings, screen, ready_fd)))
