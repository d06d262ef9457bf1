"""Load generator for an OpenAI-compatible server: TTFT, inter-token latency, tokens/s, errors.

`python -m benchmarks.bench_serve --base-url http://127.0.0.1:8000 --concurrency 8 --plot a.png`
ends with 1 when any request failed. Every stream is checked: it must end as it should and, unless
--no-ignore-eos, bring exactly as many tokens as were asked for.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.options import add_server_options
from benchmarks.serve.client import Server
from benchmarks.serve.load import Load, Outcome
from benchmarks.serve.report import Summary, environment, show, summarize, write_json
from benchmarks.serve.workload import Ask, Shape, file_asks, first_model, random_asks


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="bench_serve")
    add = parser.add_argument
    add("--endpoint", choices=("chat", "completions"), default="completions")
    add("--dataset", default="random", help="random, or a file of JSON lines")
    add("--num-requests", type=int, default=100)
    add("--concurrency", type=int, default=8, help="requests in flight at most")
    add("--request-rate", type=float, help="requests a second, Poisson; default: closed loop")
    add("--input-len", type=int, default=128, help="prompt tokens (random)")
    add("--output-len", type=int, default=64)
    add("--temperature", type=float, default=0.0)
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    add("--warmup", type=int, default=2, help="requests before the measurement")
    add("--timeout", type=float, default=300.0, help="seconds for one request")
    add_server_options(parser)
    add("--plot", type=Path, help="write a picture")
    return parser.parse_args(arguments)


async def make_asks(options: argparse.Namespace, server: Server, shape: Shape) -> list[Ask]:
    """Warm-up and measured requests."""
    count = options.warmup + options.num_requests
    random = Random(options.seed)
    if options.dataset == "random":
        lengths = (options.input_len, options.output_len)
        return await random_asks(server, shape, count, lengths, random)
    return file_asks(Path(options.dataset), count, options.output_len, random)


async def run(options: argparse.Namespace, console: Console) -> list[Outcome]:
    """Warm up, then measure."""
    server = Server(options.base_url, options.api_key)
    options.model = options.model or await first_model(server)
    shape = Shape(options.model, options.endpoint, options.temperature, options.ignore_eos)
    asks = await make_asks(options, server, shape)
    warm, asks = asks[: options.warmup], asks[options.warmup :]
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[errors]}"),
        console=console,
        refresh_per_second=2,
    )
    with progress:
        bar = progress.add_task("warm-up", total=len(warm), errors="")
        failed = 0

        def count(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            progress.update(bar, advance=1, errors=f"[red]{failed} failed" if failed else "")

        load = Load(server, shape, options.concurrency, options.timeout, count)
        await load.closed(warm)
        progress.reset(bar, total=len(asks), description="requests")
        if options.request_rate is None:
            outcomes = await load.closed(asks)
        else:
            outcomes = await load.open(asks, options.request_rate, Random(options.seed))
        load.close()
    return outcomes


def save(options: argparse.Namespace, summary: Summary) -> None:
    """Write the numbers, what was asked for, and where it ran; without the key."""
    config = {key: value for key, value in vars(options).items() if key != "api_key"}
    found = {"config": config, "environment": environment(), "results": summary}
    write_json(options.out, found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, report; 0 when every request was answered right."""
    options = parse(arguments)
    console = Console(stderr=True)
    try:
        outcomes = uvloop.run(run(options, console))
    except (OSError, ValueError) as error:
        console.print(f"[red]{error}")
        return 2
    summary = summarize(outcomes)
    show(summary, console)
    if options.out:
        save(options, summary)
    if options.plot:
        # matplotlib takes a second to import.
        from benchmarks.serve.plot import plot

        plot(outcomes, f"{options.model}, concurrency {options.concurrency}", options.plot)
    return 1 if summary["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
