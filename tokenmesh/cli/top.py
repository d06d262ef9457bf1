"""`tokenmesh top`: the instances of the mesh and the load of its workers, live."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenmesh.cli.api import DEFAULT_URL, Api
from tokenmesh.shared.clock import sleep_s
from tokenmesh.shared.errors import Unavailable

_WORKER: Final = "worker"
_LOAD: Final = ("run", "wait", "KV", "queued", "prefill/s", "step", "preempted", "hits")
_RIGHT: Final = frozenset(_LOAD)
Process = Mapping[str, Any]


def draw_mesh(state: Mapping[str, Any]) -> RenderableType:
    """The answer of GET /mesh as tables."""
    processes: Sequence[Process] = state["processes"]
    workers = [each for each in processes if each["service"] == _WORKER]
    parts: list[RenderableType] = [_workers(workers), Text(), _all_processes(processes)]
    parts += [
        Text(
            f"{each['id']} uses protocol {each['protocol']}, the mesh {state['protocol']}: "
            "it is ignored",
            "yellow",
        )
        for each in state["other_protocols"]
    ]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=True)
    return table


def _workers(workers: Sequence[Process]) -> Table:
    table = _table("worker", "model", *_LOAD)
    for each in workers:
        cells = [each["id"], ", ".join(each["models"]), *_load_cells(each["load"] or {})]
        table.add_row(*map(Text, cells))
    return table


def _all_processes(processes: Sequence[Process]) -> Table:
    table = _table("process", "state", "queued", "version", "epoch")
    for each in processes:
        cells = (str(each["queued"] or ""), each["version"], _epoch(each))
        table.add_row(Text(each["id"]), _state(each), *map(Text, cells))
    return table


def _load_cells(load: Mapping[str, Any]) -> list[str]:
    if not load:
        return [""] * len(_LOAD)
    looked_up = load["cached_tokens"] + load["prefill_tokens"]
    return [
        f"{load['running']}/{load['max_num_seqs']}",
        str(load["waiting"]),
        f"{load['kv_blocks_used'] / max(1, load['kv_blocks_total']):.0%}",
        str(load["queued_tokens"]),
        f"{load['prefill_tokens_per_s']:.0f}" if load["prefill_tokens_per_s"] else "",
        f"{1000 * load['step_s']:.1f} ms" if load["step_s"] else "",
        str(load["preemptions"]),
        f"{load['cached_tokens'] / looked_up:.0%}" if looked_up else "",
    ]


def _state(process: Process) -> Text:
    if process["draining"]:
        return Text("draining", "yellow")
    if (process["load"] or {}).get("sleep_level"):
        return Text("asleep", "dim")
    return Text("up", "green")


def _epoch(process: Process) -> str:
    """Enough of it to see that a process is another one."""
    return f"{int(process['epoch']):016x}"[:8]


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
