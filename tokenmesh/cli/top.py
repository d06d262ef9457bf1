"""`tokenmesh top`: the instances of the mesh and the load of its workers, live."""

import json
import os
import select
import sys
import termios
import tty
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenmesh.cli.api import DEFAULT_URL, GatewayClient, Url
from tokenmesh.cli.rates import MeshRates, read_counts
from tokenmesh.shared.clock import monotonic_s, sleep_s
from tokenmesh.shared.errors import Unavailable

_WORKER: Final = "worker"
_LOAD: Final = ("run", "wait", "KV", "queued", "prefill/s", "step", "preempted", "hits")
_ELSEWHERE: Final = ("role", "leases", "tiers")
"""Shown where any worker has KV outside of its pool."""
_RIGHT: Final = frozenset((*_LOAD, "leases"))
_SORTS: Final = ("id", "running", "waiting", "kv_blocks_used")
"""The key `s` sorts workers by these in turn: by id, or by a field of their load."""
Process = Mapping[str, Any]


def draw_mesh(state: Mapping[str, Any], rates: str = "", sort_by: str = "id") -> RenderableType:
    """The answer of GET /mesh as tables, below a line of rates."""
    processes: Sequence[Process] = state["processes"]
    workers = [each for each in processes if each["service"] == _WORKER]
    if sort_by != "id":
        workers.sort(key=lambda each: -(each["load"] or {}).get(sort_by, 0))
    parts: list[RenderableType] = [Text(rates, "bold"), Text()] if rates else []
    parts += [_workers(workers), Text(), _all_processes(processes)]
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
    exchange = any(each.get("kv_role") or each.get("kv_tiers") for each in workers)
    table = _table("worker", "model", *_LOAD, *(_ELSEWHERE if exchange else ()))
    for each in workers:
        models = ", ".join(each["models"]) + _parallel(each)
        cells = [each["id"], models, *_load_cells(each["load"] or {})]
        table.add_row(*map(Text, cells + (_elsewhere_cells(each) if exchange else [])))
    return table


def _parallel(worker: Process) -> str:
    """The ranks of each stage and the stages, as ` tp2 pp2`; empty for one process."""
    stages = worker.get("stages", 1)  # a gateway of an earlier version has none
    parts = {"tp": worker.get("ranks", 1) // stages, "pp": stages}
    return "".join(f" {name}{count}" for name, count in parts.items() if count > 1)


def _elsewhere_cells(worker: Process) -> list[str]:
    """Return what it does for others, prompts that it keeps for them, and where its KV is."""
    leases = (worker["load"] or {}).get("kv_leases", 0)
    return [
        worker.get("kv_role") or "",
        str(leases) if leases else "",
        ", ".join(worker.get("kv_tiers") or ()),
    ]


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
    url: Url = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a look, for scripts.")
    ] = False,
) -> None:
    """Show every process, how busy the workers are, and rates of the whole mesh."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    with GatewayClient(url, api_key) as api:
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
        with Live(shown, console=console, screen=True, auto_refresh=False) as live, Keys() as keys:
            LiveMesh(api, live, interval).run(keys)


class Keys:
    """Single keys of the terminal, without Enter; a context manager. None come from a pipe."""

    def __enter__(self) -> "Keys":
        self._saved = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
        if self._saved is not None:
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)

    def wait(self, seconds: float) -> str:
        """The next key; empty when the time is over."""
        if self._saved is None:
            sleep_s(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "ignore") if ready else ""


class LiveMesh:
    """The screen of `top`: what it shows, and what keys change about that."""

    def __init__(self, api: GatewayClient, live: Live, interval_s: float) -> None:
        self._api = api
        self._live = live
        self._interval_s = interval_s
        self._rates = MeshRates()
        self._sort = 0
        self._is_paused = False
        self._next_s = 0.0

    def run(self, keys: Keys) -> None:
        """Draw the mesh again and again until the key `q` comes."""
        while True:
            if not self._is_paused and monotonic_s() >= self._next_s:
                self._next_s = monotonic_s() + self._interval_s
                self._live.update(self._look(), refresh=True)
            left_s = max(0.0, self._next_s - monotonic_s())
            match keys.wait(self._interval_s if self._is_paused else left_s):
                case "q":
                    return
                case "p":
                    self._is_paused = not self._is_paused
                case "s":
                    self._sort = (self._sort + 1) % len(_SORTS)
                    self._next_s = 0.0

    def _look(self) -> RenderableType:
        """The mesh, or why it cannot be shown: a gateway that leaves may come back."""
        try:
            state, metrics = self._api.mesh(), self._api.metrics()
        except Unavailable as error:
            return Text(error.message, "yellow")
        self._rates.add(read_counts(monotonic_s(), state, metrics))
        sort_by = _SORTS[self._sort]
        keys = f"q quit   p pause   s sort workers by {_SORTS[(self._sort + 1) % len(_SORTS)]}"
        return Group(draw_mesh(state, self._rates.summary(), sort_by), Text(), Text(keys, "dim"))
