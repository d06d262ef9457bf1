"""Any op of tokenmesh.kernels over a sweep of batches, compared with its reference and torch.

    python -m benchmarks.bench_ops --ops paged_attention --batches q2k 8q1s4k 64q1s1k q512_8q1s4k
    python -m benchmarks.bench_ops --device cuda --model llama-3.1-8b --out ops_gpu.json

The batch language: [sequences]q<new tokens>[s<context>], groups joined by _; k is 1,024. Caches are
emptied before each call. An op whose tests fail, or whose result differs from the reference on the
very inputs to be timed, is not reported, and the exit status is 1.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.limits import memory_speed, product_speed
from benchmarks.ops.batch import Batch, BatchError, parse_batch
from benchmarks.ops.catalog import FOLDERS, WORKS, case_works
from benchmarks.ops.gate import RedTests, require_green, require_right
from benchmarks.ops.measure import measure
from benchmarks.ops.results import Limits, Line, Sweep
from benchmarks.ops.work import Dimensions, Work
from benchmarks.random_model import SHAPES
from benchmarks.serve.results import environment, write_json
from benchmarks.timing import Stopwatch

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_SWEEP: Final = ("q1s1k", "8q1s1k", "8q1s4k", "32q1s1k", "q128", "q512", "q512_8q1s1k")


def batch(text: str) -> Batch:
    """For argparse, which shows the message of this error only."""
    try:
        return parse_batch(text)
    except BatchError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_ops", formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--ops", nargs="+", default=sorted(WORKS), help="folders of tokenmesh/kernels")
    add("--batches", nargs="+", type=batch, default=[parse_batch(each) for each in _SWEEP])
    add("--model", choices=sorted(SHAPES), default="qwen2.5-0.5b", help="whose layers")
    add("--dtype", choices=sorted(_DTYPES), default="bfloat16")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=os.cpu_count())
    add("--seconds", type=float, default=0.5, help="for each number")
    add("--out", type=Path, help="write the numbers as JSON")
    return parser.parse_args(arguments)


def works(options: argparse.Namespace, op: str) -> Iterator[tuple[str, Work]]:
    """(batch or case, work). Raises ModuleNotFoundError for an op that is neither."""
    dtype, device = _DTYPES[options.dtype], torch.device(options.device)
    if op not in WORKS:
        yield from case_works(op, dtype, device)
        return
    sizes = dimensions(options.model)
    for each in options.batches:
        torch.manual_seed(0)
        yield each.text, WORKS[op](each, sizes, dtype, device)


def dimensions(model: str) -> Dimensions:
    """Return the dimensions of a layer of a known shape."""
    config = SHAPES[model].config
    heads = int(config["num_attention_heads"])
    return Dimensions(
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config.get("head_dim", int(config["hidden_size"]) // heads)),
    )


def sweep(options: argparse.Namespace, console: Console) -> Sweep:
    """Prove and measure."""
    device = torch.device(options.device)
    at_start = environment()
    limits = Limits(memory_speed(device), product_speed(device, _DTYPES[options.dtype]))
    watch = Stopwatch(device, options.seconds)
    lines: list[Line] = []
    red: dict[str, str] = {}
    for op in options.ops:
        try:
            require_green(FOLDERS.get(op, op), device)
            for name, work in works(options, op):
                require_right(f"{op} on {name}", work)
                lines.append(measure(op, name, work, limits, watch))
                console.print(f"{op} on {name}: {lines[-1].us} us", highlight=False)
        except (RedTests, ModuleNotFoundError) as error:
            red[op] = str(error)
            lines = [line for line in lines if line.op != op]
    config = {**vars(options), "batches": [each.text for each in options.batches]}
    return Sweep(
        config={key: value for key, value in config.items() if key != "out"},
        environment=at_start,
        load_average_end=os.getloadavg()[0],
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        limits=limits,
        lines=lines,
        red=red,
    )


def show(found: Sweep, console: Console) -> None:
    """Print the table, and the ops that are red."""
    title = (
        f"{found.device}: {found.limits.bytes_per_s / 1e9:.0f} GB/s, "
        f"{found.limits.flops_per_s / 1e12:.2f} TFLOP/s at most"
    )
    headings = ("op", "batch", "us", "reference us", "torch us", "GB/s", "TFLOP/s", "of limit")
    table = Table(*headings, title=title)
    for line in found.lines:
        others = ("-" if each is None else f"{each}" for each in (line.reference_us, line.torch_us))
        speeds = (f"{line.gb_per_s}", f"{line.tflop_per_s}", f"{line.share:.0%}")
        table.add_row(line.op, line.batch, f"{line.us}", *others, *speeds)
    console.print(table)
    for op, reason in found.red.items():
        console.print(f"[red]{op} is not reported:[/] {reason}", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every op was reported."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    with torch.inference_mode():
        found = sweep(options, console)
    show(found, console)
    if options.out:
        write_json(options.out, found)
    return 1 if found.red else 0


if __name__ == "__main__":
    sys.exit(main())
