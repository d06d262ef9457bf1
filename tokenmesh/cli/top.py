"""`tokenmesh top`: the mesh, live."""

import json
from typing import Annotated, Final

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from tokenmesh.cli.api import DEFAULT_URL, Api
from tokenmesh.cli.mesh_table import draw_mesh
from tokenmesh.shared.clock import sleep_s
from tokenmesh.shared.errors import Unavailable

_FILE_WIDTH: Final = 160


def top(
    url: Annotated[str, typer.Option(help="The gateway.")] = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a look, for scripts.")
    ] = False,
) -> None:
    """Show every process and how busy the workers are. Ctrl-C ends it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    with Api(url, api_key) as api:
        if as_json:
            while True:
                typer.echo(json.dumps(api.mesh()))
                if once:
                    return
                sleep_s(interval)
        shown = draw_mesh(api.mesh())
        if once or not console.is_terminal:
            console.print(shown)
            return
        with Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while True:
                sleep_s(interval)
                live.update(_look(api), refresh=True)


def _look(api: Api) -> RenderableType:
    """The mesh, or why it is not to be seen: a gateway that leaves may come back."""
    try:
        return draw_mesh(api.mesh())
    except Unavailable as error:
        return Text(error.message, "yellow")
