"""The sections of what the engine's programs write: decode, bound, start, scheduler, ops."""

from collections.abc import Iterator
from typing import Final

from benchmarks.bench_startup import StartupResult
from benchmarks.engine_results import BoundResult, EngineResult, SchedulerResult
from benchmarks.ops.results import Line, Sweep
from benchmarks.page.table import number, origin, table

_STEP_BARS_US: Final = {256: 100.0, 1024: 400.0}


def decode_section(result: EngineResult) -> Iterator[str]:
    """Decode compared with transformers.generate in one process."""
    yield "## Decode without HTTP"
    yield ""
    yield origin(result.environment, result.load_average_end)
    yield (
        f"{result.config['model']}, {result.config['threads']} threads, "
        f"{result.config['clock']} clock, tokens/s after the first token, both in one process. "
        "`python -m benchmarks.bench_engine`."
    )
    yield ""
    rows = (
        [
            str(line.batch),
            number(line.engine),
            number(line.transformers),
            f"{line.engine / line.transformers:.2f}x",
        ]
        for line in result.decode
    )
    yield from table(["streams", "engine", "transformers.generate", "ratio"], rows)


def nano_section(result: EngineResult) -> Iterator[str]:
    """nano-vllm's workload."""
    line = result.nano
    assert line is not None
    yield "## nano-vllm's workload, offline"
    yield ""
    yield origin(result.environment, result.load_average_end)
    yield (
        f"{result.config['model']}, {result.config['threads']} threads; {line.requests} of its 256 "
        f"requests: {line.prompt_tokens:,} prompt and {line.output_tokens:,} output tokens. "
        "`python -m benchmarks.bench_engine --workload nano`."
    )
    yield ""
    rows = [
        ["TokenMesh's engine", number(line.engine_s), number(line.output_tokens / line.engine_s)]
    ]
    if line.transformers_s is not None:
        speed = number(line.output_tokens / line.transformers_s)
        rows.append(["transformers continuous batching", number(line.transformers_s), speed])
    yield from table(["", "seconds", "output tokens/s"], rows)


def bound_section(result: BoundResult) -> Iterator[str]:
    """Decode steps compared with plain reads."""
    yield "## Decode compared with the bandwidth bound"
    yield ""
    yield origin(result.environment, result.load_average_end)
    yield (
        f"One stream, {result.threads} threads, bfloat16; decode steps and plain reads of as many "
        "bytes as the weights have take turns, medians. `python -m benchmarks.bound`."
    )
    yield ""
    rows = (
        [
            line.model,
            number(line.step_ms, 2),
            number(line.read_ms, 2),
            f"{line.share:.0%}",
        ]
        for line in result.lines
    )
    yield from table(["model", "a step, ms", "a read, ms", "of the bound"], rows)


def startup_section(result: StartupResult) -> Iterator[str]:
    """A worker's way to its first token."""
    stages = result.stages
    yield "## Start of a worker"
    yield ""
    yield origin(result.environment, result.load_average_end)
    yield (
        f"{result.config['model']}, {stages.num_bytes / 1e9:.2f} GB of weights in the page cache: "
        f"reading takes {stages.read_ratio:.2f} and loading {stages.load_ratio:.2f} times a plain "
        "read of the files. `python -m benchmarks.bench_startup`."
    )
    yield ""
    names = ("import", "read", "pack", "pool", "other", "first_token", "ready")
    rows = ([name.replace("_", " "), number(getattr(stages, f"{name}_s"), 2)] for name in names)
    yield from table(["stage", "seconds"], rows)


def scheduler_section(result: SchedulerResult) -> Iterator[str]:
    """CPU of a step without a model."""
    yield "## CPU of the scheduler"
    yield ""
    yield origin(result.environment, result.load_average_end)
    yield "Processor time of one decode step, no model. `python -m benchmarks.bench_scheduler`."
    yield ""
    heads = ["running requests", "schedule and draw, us", "whole engine step, us", "bar, us"]
    rows = (
        [
            str(count),
            number(line.scheduler_us),
            number(line.engine_us),
            number(_STEP_BARS_US.get(count), 0),
        ]
        for count, line in sorted(result.lines.items())
    )
    yield from table(heads, rows)


def ops_section(sweep: Sweep) -> Iterator[str]:
    """A sweep over ops."""
    yield f"## Ops on {'a GPU' if sweep.config['device'] == 'cuda' else 'the CPU'}"
    yield ""
    yield origin(sweep.environment, sweep.load_average_end)
    threads = f"{sweep.config['threads']} threads" * (sweep.device == "cpu")
    yield (
        f"{threads or sweep.device}, {sweep.config['dtype']}, layers of {sweep.config['model']}; "
        f"at most {sweep.limits.bytes_per_s / 1e9:.0f} GB/s and "
        f"{sweep.limits.flops_per_s / 1e12:.2f} TFLOP/s in the same run, caches emptied before "
        "each call. `8q1s4k`: 8 sequences of 1 new token and 4,096 keys. "
        "`python -m benchmarks.bench_ops`."
    )
    yield ""
    heads = ["op on batch", "us", "reference, us", "torch, us", "GB/s", "TFLOP/s", "of the limit"]
    yield from table(heads, map(_op, sweep.lines))
    if sweep.red:
        yield ""
        yield "Not reported, because their tests fail: " + ", ".join(sorted(sweep.red))


def _op(line: Line) -> list[str]:
    speeds = [number(line.gb_per_s), number(line.tflop_per_s, 2), f"{line.share:.0%}"]
    times = [number(each) for each in (line.us, line.reference_us, line.torch_us)]
    return [f"{line.op} `{line.batch}`", *times, *speeds]
