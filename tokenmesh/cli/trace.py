"""`tokenmesh trace`: where each millisecond of a request went."""

from typing import Annotated

import typer
from rich.console import Console

from tokenmesh.cli.api import DEFAULT_URL, Api
from tokenmesh.cli.waterfall import draw, read_spans


def trace(
    trace_id: Annotated[str, typer.Argument(metavar="ID", help="Id of a request or a trace.")],
    url: Annotated[str, typer.Option(help="The gateway.")] = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key.")] = None,
) -> None:
    """Draw the spans of a request as a waterfall."""
    with Api(url, api_key) as api:
        found = api.trace(trace_id)
    console = Console(highlight=False)
    console.print(
        f"trace {found.get('trace_id')}  request {found.get('request_id')}",
        style="bold",
        markup=False,
        soft_wrap=True,
    )
    console.print(draw(read_spans(found), console))
