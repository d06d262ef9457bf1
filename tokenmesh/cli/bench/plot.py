"""A picture of a run: three distributions, and tokens per second over time."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from tokenmesh.cli.bench.load import Outcome
from tokenmesh.cli.bench.report import first_token_s, gaps_s

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_MIN_BUCKET_S = 0.1
_MAX_BUCKETS = 100


def plot(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Write a picture of the format that the suffix of `path` names."""
    good = [outcome for outcome in outcomes if outcome.error is None and outcome.token_times]
    figure, ((ttft, itl), (whole, rate)) = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    _cumulative(ttft, [first_token_s(outcome) for outcome in good], "time to first token")
    _cumulative(itl, [gap for outcome in good for gap in gaps_s(outcome)], "inter-token latency")
    _cumulative(whole, [outcome.ended_s - outcome.began_s for outcome in good], "whole request")
    _chunks_over_time(rate, good)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _cumulative(axes: Axes, values_s: Sequence[float], name: str) -> None:
    ordered = sorted(value * 1e3 for value in values_s)
    shares = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
    axes.step(ordered, shares, where="post")
    axes.set(xlabel=f"{name} (ms)", ylabel="% of requests" if "token" not in name else "%")
    axes.set_ylim(0, 101)
    axes.grid(alpha=0.3)


def _chunks_over_time(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    began_s = min((outcome.began_s for outcome in outcomes), default=0.0)
    times_s = [at - began_s for outcome in outcomes for at in outcome.token_times]
    width_s = max(_MIN_BUCKET_S, max(times_s, default=0.0) / _MAX_BUCKETS)
    counts = Counter(int(at / width_s) for at in times_s)
    buckets = range(max(counts, default=0) + 1)
    rates = [counts[bucket] / width_s for bucket in buckets]
    axes.step([bucket * width_s for bucket in buckets], rates, where="post")
    axes.set(xlabel="time (s)", ylabel="chunks with output per second", ylim=(0, None))
    axes.grid(alpha=0.3)
