"""`tokenmesh drain`: stop one process after its work is finished or handed over."""

from typing import Annotated, Final

import typer

from tokenmesh.cli.api import DEFAULT_URL, GatewayClient, Url
from tokenmesh.shared.clock import monotonic_s, sleep_s
from tokenmesh.shared.errors import Unavailable

STILL_THERE: Final = 1
_POLL_S: Final = 0.2
_GATEWAY: Final = "gateway-"


def drain(
    process_id: Annotated[
        str, typer.Argument(metavar="ID", help="Of a process, as `tokenmesh top` shows it.")
    ],
    url: Url = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key.")] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until it has left; 0: do not wait.")
    ] = 60.0,
) -> None:
    """Let a process finish what it has and leave.

    The gateway needs --enable-admin-routes. Exit code 1: the process is still there.
    """
    with GatewayClient(url, api_key) as api:
        api.drain(process_id)
        if not wait:
            typer.echo(f"{process_id} drains")
            return
        give_up_s = monotonic_s() + wait
        while _is_there(api, process_id):
            if monotonic_s() >= give_up_s:
                typer.echo(f"{process_id} is still there after {wait:g} s", err=True)
                raise typer.Exit(STILL_THERE)
            sleep_s(_POLL_S)
    typer.echo(f"{process_id} has left")


def _is_there(api: GatewayClient, process_id: str) -> bool:
    try:
        return any(each["id"] == process_id for each in api.mesh()["processes"])
    except Unavailable:
        # the gateway does not answer: it may be the drained one
        return not process_id.startswith(_GATEWAY)
