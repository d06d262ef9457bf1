"""`tokenmesh bench serve`, `sweep` and `startup`, with the flags of `vllm bench serve`."""

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
import uvloop
from rich.console import Console

from tokenmesh.cli.bench.load import Outcome
from tokenmesh.cli.bench.options import Variants, checked, option, with_load
from tokenmesh.cli.bench.report import METRICS, PERCENTILES, Summary, show, summarize
from tokenmesh.cli.bench.run import BenchRun
from tokenmesh.cli.bench.speculation import Speculation
from tokenmesh.cli.bench.startup import measure_starts
from tokenmesh.cli.bench.sweep import Sweep
from tokenmesh.cli.bench.sweep import plot as plot_sweeps
from tokenmesh.shared.errors import ConfigError

SOME_FAILED: Final = 1

bench: Final = typer.Typer(
    name="bench", help="Measure a running server, or how fast one starts.", no_args_is_help=True
)


@bench.command()
@with_load
def serve(
    *,
    load: BenchRun,
    api_key: str | None,
    goals: dict[str, float],
    request_rate: Annotated[
        float, option("Requests a second; inf: all at once.", "--request-rate")
    ] = math.inf,
    percentile_metrics: Annotated[
        str, option("Latencies to show, separated by commas.", "--percentile-metrics")
    ] = ",".join(METRICS),
    metric_percentiles: Annotated[
        str, option("Percentiles to show, separated by commas.", "--metric-percentiles")
    ] = ",".join(f"{rank:g}" for rank in PERCENTILES),
    result: Annotated[Path | None, option("Write the numbers as JSON.", "--result")] = None,
    plot: Annotated[Path | None, option("Write a picture; needs matplotlib.", "--plot")] = None,
) -> None:
    """Send requests to a server: TTFT, inter-token latency, tokens/s, goodput, errors.

    Every stream is checked: it must end as it should and, with --ignore-eos, bring exactly as many
    tokens as it was to. Exit code 1: a request failed.
    """
    ranks = checked(_ranks, metric_percentiles)
    metrics = checked(_metrics, percentile_metrics)
    if not request_rate > 0:
        raise ConfigError(f"--request-rate {request_rate}: it must be above 0")
    _check_outputs({"--result": result, "--plot": plot})
    load = replace(load, request_rate=request_rate)
    console = Console(stderr=True)
    outcomes, drafts = _measure(load, api_key, console)
    summary = summarize(outcomes, ranks, goals)
    if drafts is not None:
        summary["speculation"] = drafts
    show(summary, console, metrics)
    if result:
        save(result, load.config(), summary)
    if plot:
        _plot(outcomes, f"{load.num_prompts} requests to {load.base_url}", plot)
    raise typer.Exit(SOME_FAILED if summary["errors"] else 0)


@bench.command()
@with_load
def sweep(
    *,
    load: BenchRun,
    api_key: str | None,
    goals: dict[str, float],
    variants: Variants,
    bench_params: Annotated[
        Path | None,
        option("JSON list of settings of the load; each is swept.", "--bench-params"),
    ] = None,
    share: Annotated[
        float, option("Requests that must meet the goals.", "--share", min=0.01, max=1)
    ] = 0.95,
    start_rate: Annotated[
        float, option("Requests a second to begin with.", "--start-rate", min=0.001)
    ] = 1.0,
    precision: Annotated[
        float, option("End when the border is known so well.", "--precision", min=0.01, max=1)
    ] = 0.1,
    history: Annotated[
        Path | None,
        option("JSON lines: rates measured before are not measured again.", "--history"),
    ] = None,
    plot: Annotated[Path | None, option("Write a picture; needs matplotlib.", "--plot")] = None,
) -> None:
    """Find the highest request rate at which the goals of --goodput are met."""
    if not goals:
        raise ConfigError("--goodput is missing: it says what must hold", param="--goodput")
    _check_outputs({"--history": history, "--plot": plot})
    console = Console(stderr=True)
    loads = variants(bench_params) if bench_params else {"": load}
    sweeps = {
        name: Sweep(replace(each, request_rate=start_rate), goals, share, precision, history)
        for name, each in loads.items()
    }
    found = []
    for name, search in sweeps.items():
        if name:
            console.print(name, style="bold", markup=False)
        best = search.search(lambda each: _measure(each, api_key, console)[0], console)
        found.append(best)
        search.show(console)
        if best is None:
            console.print("[red]no rate that was tried met the goals")
        else:
            typer.echo(f"{name}: {best:.3g} requests/s" if name else f"{best:.3g} requests/s")
    if plot:
        plot_sweeps(sweeps, goals, share, plot)
    if not any(found):
        raise typer.Exit(SOME_FAILED)


@bench.command(context_settings={"ignore_unknown_options": True})
def startup(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL] [FLAGS]", help="As for `tokenmesh up`.")
    ] = None,
    rounds: Annotated[int, option("How often to start.", "--rounds", min=1)] = 3,
    result: Annotated[
        Path | None, option("Write the numbers as JSON.", "--result", "--output-json")
    ] = None,
) -> None:
    """Measure how long `tokenmesh up` takes until it is ready, and until the first token."""
    _check_outputs({"--result": result})
    starts = measure_starts(words or (), rounds)
    if result:
        # without the flags: they may hold keys
        models = [each for each in (words or ())[:1] if not each.startswith("-")]
        config = {"model": models[0] if models else None, "rounds": rounds}
        save(result, config, starts._asdict())
    for name, value_s in (("ready", min(starts.ready_s)), ("first token", min(starts.token_s))):
        typer.echo(f"{name} after {value_s:.2f} s (the best of {rounds})")


def save(path: Path, config: Mapping[str, object], results: Summary | Mapping[str, object]) -> None:
    """Write the numbers and what was measured, as JSON; without the key."""
    encoded = msgspec.json.encode({"config": config, "results": results}, enc_hook=str)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")


def _measure(
    run: BenchRun, api_key: str | None, console: Console
) -> tuple[list[Outcome], Speculation | None]:
    try:
        return uvloop.run(run.measure(api_key, console))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run.base_url}: {error}") from error


def _ranks(text: str) -> list[float]:
    ranks = [float(each) for each in text.split(",")]
    if not all(0 <= rank <= 100 for rank in ranks):
        raise ValueError(f"--metric-percentiles {text}: between 0 and 100")
    return ranks


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(METRICS):
        raise ValueError(f"--percentile-metrics {', '.join(unknown)}: not of {', '.join(METRICS)}")
    return names


def _plot(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    # a slow import
    from tokenmesh.cli.bench.plot import plot

    plot(outcomes, title, path)


def _check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written before minutes are spent on their contents."""
    for flag, path in paths.items():
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {error.strerror}", param=flag) from error
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{flag} {path}: it cannot be written", param=flag)
    if paths.get("--plot") is not None:
        _check_matplotlib()


def _check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: `pip install matplotlib`", param="--plot")
