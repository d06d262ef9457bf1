"""Numbers of a run: percentiles, rates, errors by kind, and where they were measured."""

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.serve.load import Outcome

PERCENTILES = (50, 90, 95, 99)
ROOT = Path(__file__).resolve().parents[2]


class Distribution(TypedDict):
    """Milliseconds."""

    mean: float
    max: float
    percentiles: dict[str, float]


class Summary(TypedDict):
    """All numbers of a run."""

    duration_s: float
    completed: int
    errors: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Distribution
    itl_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution


def distribution(values_s: Sequence[float]) -> Distribution:
    """Of seconds, in milliseconds; zeros when there are none."""
    ordered = sorted(values_s)
    if not ordered:
        return Distribution(
            mean=0.0, max=0.0, percentiles={f"p{rank}": 0.0 for rank in PERCENTILES}
        )
    percentiles = {f"p{rank}": round(percentile(ordered, rank) * 1e3, 3) for rank in PERCENTILES}
    return Distribution(
        mean=round(sum(ordered) / len(ordered) * 1e3, 3),
        max=round(ordered[-1] * 1e3, 3),
        percentiles=percentiles,
    )


def percentile(ordered: Sequence[float], rank: float) -> float:
    """Linear interpolation between the closest ranks; 0 for nothing."""
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * rank / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def first_token_s(outcome: Outcome) -> float:
    """Time to first token."""
    return outcome.token_times[0] - outcome.began_s


def gaps_s(outcome: Outcome) -> list[float]:
    """Times between chunks with output: inter-token latency as a client sees it."""
    return [after - before for before, after in pairwise(outcome.token_times)]


def _token_s(outcome: Outcome) -> float:
    return (outcome.token_times[-1] - outcome.token_times[0]) / (outcome.output_tokens - 1)


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """The numbers; latencies are those of requests without an error."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    said = [outcome for outcome in good if outcome.token_times]
    began_s = min((outcome.began_s for outcome in outcomes), default=0.0)
    ended_s = max((outcome.ended_s for outcome in outcomes), default=0.0)
    duration_s = max(ended_s - began_s, 1e-9)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    return Summary(
        duration_s=round(duration_s, 3),
        completed=len(good),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=round(len(good) / duration_s, 3),
        output_tokens_per_s=round(output_tokens / duration_s, 2),
        total_tokens_per_s=round((prompt_tokens + output_tokens) / duration_s, 2),
        ttft_ms=distribution([first_token_s(outcome) for outcome in said]),
        itl_ms=distribution([gap for outcome in said for gap in gaps_s(outcome)]),
        tpot_ms=distribution([_token_s(outcome) for outcome in said if outcome.output_tokens > 1]),
        e2e_ms=distribution([outcome.ended_s - outcome.began_s for outcome in good]),
    )


def environment() -> dict[str, object]:
    """The machine, the commit and the moment."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def write_json(path: Path, result: object) -> None:
    """Save a result: a Struct, or what JSON knows; paths and the like in it become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode(result, enc_hook=str)
    path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")


def show(summary: Summary, console: Console) -> None:
    """Print the numbers as two tables."""
    rates = Table(title="Serving benchmark", show_header=False)
    rates.add_row("requests", f"{summary['completed']} in {summary['duration_s']:.1f} s")
    rates.add_row("requests/s", f"{summary['requests_per_s']:.2f}")
    rates.add_row("output tokens/s", f"{summary['output_tokens_per_s']:.1f}")
    rates.add_row("total tokens/s", f"{summary['total_tokens_per_s']:.1f}")
    for kind, count in sorted(summary["errors"].items()):
        rates.add_row(f"[red]{kind}", f"[red]{count}")
    console.print(rates)
    times = Table("ms", "mean", *(f"p{rank}" for rank in PERCENTILES), "max")
    for name, found in (
        ("time to first token", summary["ttft_ms"]),
        ("inter-token latency", summary["itl_ms"]),
        ("time per output token", summary["tpot_ms"]),
        ("whole request", summary["e2e_ms"]),
    ):
        values = (found["mean"], *found["percentiles"].values(), found["max"])
        times.add_row(name, *(f"{value:.2f}" for value in values))
    console.print(times)
