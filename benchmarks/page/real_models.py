"""The section of real models compared with llama.cpp."""

from collections.abc import Iterator

from benchmarks.bench_real_models import LLAMA, OURS, RealModelsResult, Side
from benchmarks.page.table import number, origin, table


def real_models_section(result: RealModelsResult) -> Iterator[str]:
    """Prompts, streams, loading and perplexity of files."""
    yield "## Real models compared with llama.cpp"
    yield ""
    yield origin(result.environment, result.load_average_end)
    yield (
        f"The same GGUF files, {result.config['threads']} threads each, without HTTP, in turns in "
        "one run for each file; tokens/s, ours / llama.cpp's. Ready: a new process that has loaded "
        "the file, which is in memory. `python -m benchmarks.bench_real_models`."
    )
    yield ""
    first = result.lines[0].sides[OURS]
    lengths, streams = list(first.prompt_rates), list(first.decode_rates)
    heads = ["file", *(f"prompt of {length:,}" for length in lengths)]
    heads += [f"{count} stream{'s' * (count > 1)}" for count in streams]
    heads += ["first token, ms", "ready, s"]
    rows = []
    for line in result.lines:
        pair = [line.sides[OURS], line.sides.get(LLAMA, Side())]
        cells = [_both([side.prompt_rates.get(length) for side in pair]) for length in lengths]
        cells += [_both([side.decode_rates.get(count) for side in pair]) for count in streams]
        cells.append(_both([side.ttft_ms for side in pair], 1))
        cells.append(_both([side.load_s for side in pair], 1))
        rows.append([line.name, *cells])
    yield from table(heads, rows)
    scored = [line for line in result.lines if line.exact_perplexity]
    if not scored:
        return
    yield ""
    yield (
        "Perplexity of Python's manual in windows of 1,024 tokens: with float32 activations, and "
        "how far it is from that by default and in llama.cpp."
    )
    yield ""
    rows = []
    for line in scored:
        exact = line.exact_perplexity or 1.0
        far = [(line.sides.get(name) or Side()).perplexity for name in (OURS, LLAMA)]
        rows.append(
            [
                line.name,
                number(exact, 3),
                *("-" if each is None else f"{each / exact - 1:+.2%}" for each in far),
            ]
        )
    yield from table(["file", "float32", "by default", "llama.cpp"], rows)


def _both(values: list[float | None], digits: int = 0) -> str:
    return " / ".join(number(value, digits) for value in values)
