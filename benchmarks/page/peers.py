"""The sections of peers.json and overhead.json."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.page import bars
from benchmarks.page.table import number, origin, table
from benchmarks.peers.quoted import QUOTED
from benchmarks.peers.results import ModelResult, PeersResult
from benchmarks.peers.roster import TITLES

_MAX_ADDED_TTFT_MS: Final = 1.5
_MAX_LOST: Final = 0.05


def peers_section(result: PeersResult) -> Iterator[str]:
    """Tables of every model."""
    config = result.config
    yield "## Compared with other engines"
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield origin(result.environment, result.load_average_end, f"; {versions}")
    yield (
        f"Random weights in bfloat16, prompts of {config['prompt']} random tokens, greedy, "
        f"{config['tokens']} output tokens of every stream, all streams at once, "
        f"{config['threads']} threads; the best of {config['rounds']} rounds in which all take "
        f"turns. Client priority: {result.client_priority}. `python -m benchmarks.bench_peers`."
    )
    for model in result.models:
        yield ""
        yield from _model(model)


def _model(model: ModelResult) -> Iterator[str]:
    streams = sorted(model.rounds)
    heads = [f"{count} stream{'s' * (count > 1)}" for count in streams]
    yield f"### {model.title}"
    yield ""
    yield from table(["output tokens/s, prefill included", *heads], _speeds(model, streams))
    yield ""
    yield from table(["time to first token, p50, ms", *heads], _first_tokens(model, streams))
    yield ""
    if model.bounds:
        yield _bounds(model)
        yield ""
    yield from table(["bar", "wanted", "reached", "holds"], bars.rows(model))
    if model.missing:
        yield ""
        yield "Not measured: " + "; ".join(
            f"{TITLES[name]} ({reason.splitlines()[0]})" for name, reason in model.missing.items()
        )


def _bounds(model: ModelResult) -> str:
    steps = [bound.step_ms for bound in model.bounds]
    reads = [bound.read_ms for bound in model.bounds]
    return (
        f"The weights are {model.weight_bytes / 1e6:,.0f} MB. A decode step of one stream took "
        f"{number(min(steps))} to {number(max(steps))} ms (medians of the rounds); a plain read of "
        f"as many bytes, taking turns with the steps, the fastest of several kinds, "
        f"{number(min(reads))} to {number(max(reads))} ms."
    )


def _speeds(model: ModelResult, streams: Sequence[int]) -> Iterator[list[str]]:
    for name, title in TITLES.items():
        samples = [model.best(count, name) for count in streams]
        if any(samples):
            yield [title, *(number(each.tokens_per_s) if each else "-" for each in samples)]
        elif name in QUOTED.get(model.name, {}):
            quoted = QUOTED[model.name][name]
            cells = (_range(quoted.get(count)) for count in streams)
            yield [f"*{title}: quoted from another run*", *cells]


def _range(quoted: tuple[float, float] | None) -> str:
    if quoted is None:
        return "-"
    low, high = (number(value, 0) for value in quoted)
    return f"*{low}*" if low == high else f"*{low} to {high}*"


def _first_tokens(model: ModelResult, streams: Sequence[int]) -> Iterator[list[str]]:
    for name, title in TITLES.items():
        samples = [model.best(count, name) for count in streams]
        if any(samples):
            yield [title, *(number(each.ttft_p50_ms, 0) if each else "-" for each in samples)]


def mesh_peers_section(result: Mapping[str, Any]) -> Iterator[str]:
    """The price of a request compared with another mesh."""
    yield "## The price of a request"
    yield ""
    more = f"; dynamo {result['dynamo']}" if result["dynamo"] else ""
    yield origin(result["environment"], None, more)
    shim = ", Dynamo with TCP_NODELAY" if result["config"]["has_preload"] else ""
    yield (
        "Engines that answer at once, the same client, the systems taking turns; means of "
        f"{result['config']['rounds']} rounds; CPU of all processes{shim}. Loads: streams, words "
        "of the prompt, output tokens. "
        "`python -m benchmarks.bench_mesh_peers`."
    )
    for load, systems in result["loads"].items():
        yield ""
        heads = [load, "CPU, ms a request", "requests/s", "TTFT p50, ms", "chunks a response"]
        yield from table(heads, (_price(name, each) for name, each in systems.items()))


def _price(name: str, numbers: Mapping[str, float]) -> list[str]:
    names = ("cpu_ms", "requests_per_s", "ttft_p50_ms", "chunks")
    return [name, *(number(numbers[each], 2 if each == "cpu_ms" else 1) for each in names)]


def overhead_section(result: PeersResult) -> Iterator[str]:
    """Show what the mesh adds to its engine."""
    streams = int(str(result.config["streams"]))
    yield "## What the mesh adds to its own engine"
    yield ""
    yield origin(result.environment, result.load_average_end)
    yield (
        "The whole mesh over HTTP and the same engine in-process take turns: "
        f"{result.config['requests']} single requests each, then {result.config['rounds']} loads "
        f"of {streams} streams each, "
        f"{result.config['prompt']} + {result.config['tokens']} tokens; medians. Bars: "
        f"{_MAX_ADDED_TTFT_MS} ms and {_MAX_LOST:.0%}. `python -m benchmarks.bench_overhead`."
    )
    yield ""
    heads = (
        "model",
        "added time to first token, ms",
        "a bare round trip over NATS, ms",
        f"throughput lost at {streams} streams",
    )
    yield from table([*heads, "holds"], (_overhead(model, streams) for model in result.models))


def _overhead(model: ModelResult, streams: int) -> list[str]:
    added, lost = model.added_ttft_ms, model.lost_throughput(streams)
    if added is None or lost is None:
        return [model.title, "-", "-", "-", "not measured"]
    holds = added <= _MAX_ADDED_TTFT_MS and lost <= _MAX_LOST
    shown = [number(added, 2), number(model.round_trip_ms, 2), f"{lost:.1%}"]
    return [model.title, *shown, "yes" if holds else "**no**"]
