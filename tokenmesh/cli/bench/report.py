"""Numbers of a run: percentiles, rates, goodput, errors by kind."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NotRequired, TypedDict

from rich.console import Console
from rich.table import Table

from tokenmesh.cli.bench.load import Outcome
from tokenmesh.cli.bench.recordings import edit_distance
from tokenmesh.cli.bench.speculation import Speculation

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)
METRICS: Final = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2el": "whole request",
}
"""Names of latencies, as vLLM's, and what they are."""
_IDEOGRAPH: Final = "\u3040-\u30ff\u3400-\u9fff"
_WORD: Final = re.compile(rf"[{_IDEOGRAPH}]|[^\W_{_IDEOGRAPH}]+(?:'[^\W_{_IDEOGRAPH}]+)*")
"""Characters of languages that are written without spaces count as words."""


class Distribution(TypedDict):
    """A latency over all requests, in milliseconds."""

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
    goodput_per_s: float
    """Requests that met every goal, a second; without goals, all that were answered right."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Distribution
    itl_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    audio_s: NotRequired[float]
    """The length of all recordings that were transcribed."""
    rtfx: NotRequired[float]
    """Seconds of audio in a second: the inverse of the real-time factor."""
    word_error_rate: NotRequired[float]
    """Words to insert, delete or replace, for each word of the references."""
    speculation: NotRequired[Speculation]
    """Where the server has drafted anything."""


def distribution(values_s: Sequence[float], ranks: Sequence[float] = PERCENTILES) -> Distribution:
    """Summarize seconds, in milliseconds; zeros when there are none."""
    ordered = sorted(values_s)
    if not ordered:
        return Distribution(mean=0.0, max=0.0, percentiles={f"p{rank:g}": 0.0 for rank in ranks})
    percentiles = {f"p{rank:g}": round(percentile(ordered, rank) * 1e3, 3) for rank in ranks}
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


def meets(outcome: Outcome, goals_ms: Mapping[str, float]) -> bool:
    """Return whether a request was answered right and each of its latencies is within its goal.

    `goals_ms`: milliseconds by a name of METRICS; of `itl` the mean counts.
    """
    if outcome.error is not None:
        return False
    if not outcome.token_times:
        return not goals_ms
    gaps = gaps_s(outcome)
    found_s = {
        "ttft": first_token_s(outcome),
        "itl": sum(gaps) / len(gaps) if gaps else 0.0,
        "tpot": _token_s(outcome) if outcome.output_tokens > 1 else 0.0,
        "e2el": outcome.ended_s - outcome.began_s,
    }
    return all(found_s[name] * 1e3 <= goal for name, goal in goals_ms.items())


def summarize(
    outcomes: Sequence[Outcome],
    ranks: Sequence[float] = PERCENTILES,
    goals_ms: Mapping[str, float] | None = None,
) -> Summary:
    """The numbers; latencies are those of requests without an error."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    said = [outcome for outcome in good if outcome.token_times]
    began_s = min((outcome.began_s for outcome in outcomes), default=0.0)
    ended_s = max((outcome.ended_s for outcome in outcomes), default=0.0)
    duration_s = max(ended_s - began_s, 1e-9)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    num_met = sum(meets(outcome, goals_ms or {}) for outcome in good)
    found = Summary(
        duration_s=round(duration_s, 3),
        completed=len(good),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=round(len(good) / duration_s, 3),
        goodput_per_s=round(num_met / duration_s, 3),
        output_tokens_per_s=round(output_tokens / duration_s, 2),
        total_tokens_per_s=round((prompt_tokens + output_tokens) / duration_s, 2),
        ttft_ms=distribution([first_token_s(outcome) for outcome in said], ranks),
        itl_ms=distribution([gap for outcome in said for gap in gaps_s(outcome)], ranks),
        tpot_ms=distribution(
            [_token_s(outcome) for outcome in said if outcome.output_tokens > 1], ranks
        ),
        e2e_ms=distribution([outcome.ended_s - outcome.began_s for outcome in good], ranks),
    )
    if any(outcome.recording for outcome in outcomes):
        audio_s = sum(each.recording.duration_s for each in good if each.recording is not None)
        found["audio_s"] = round(audio_s, 3)
        found["rtfx"] = round(audio_s / duration_s, 3)
        if (rate := word_error_rate(good)) is not None:
            found["word_error_rate"] = round(rate, 5)
    return found


def word_error_rate(outcomes: Sequence[Outcome]) -> float | None:
    """Over all words of all references; None when there are none."""
    num_errors = num_words = 0
    for outcome in outcomes:
        if outcome.recording is None or outcome.recording.reference is None:
            continue
        words = words_of(outcome.recording.reference)
        num_errors += edit_distance(words, words_of(outcome.text))
        num_words += len(words)
    return num_errors / num_words if num_words else None


def words_of(text: str) -> list[str]:
    """The words of a text without case and punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold().replace("\u2019", "'"))


def show(summary: Summary, console: Console, metrics: Sequence[str] = tuple(METRICS)) -> None:
    """Print the numbers as two tables; `metrics`: names of the latencies."""
    rates = Table(title="Serving benchmark", show_header=False)
    rates.add_row("requests", f"{summary['completed']} in {summary['duration_s']:.1f} s")
    rates.add_row("requests/s", f"{summary['requests_per_s']:.2f}")
    if summary["goodput_per_s"] != summary["requests_per_s"]:
        rates.add_row("of these within the goals", f"{summary['goodput_per_s']:.2f}")
    rates.add_row("output tokens/s", f"{summary['output_tokens_per_s']:.1f}")
    rates.add_row("total tokens/s", f"{summary['total_tokens_per_s']:.1f}")
    if "rtfx" in summary:
        rates.add_row("audio", f"{summary['audio_s']:.1f} s")
        rates.add_row("RTFx", f"{summary['rtfx']:.2f}")
    if "word_error_rate" in summary:
        rates.add_row("word error rate", f"{summary['word_error_rate']:.2%}")
    if "speculation" in summary:
        _add_speculation(rates, summary["speculation"])
    for kind, count in sorted(summary["errors"].items()):
        rates.add_row(f"[red]{kind}", f"[red]{count}")
    console.print(rates)
    times = Table("ms", "mean", *summary["ttft_ms"]["percentiles"], "max")
    for name in metrics:
        found = latency(summary, name)
        values = (found["mean"], *found["percentiles"].values(), found["max"])
        times.add_row(METRICS[name], *(f"{value:.2f}" for value in values))
    console.print(times)


def _add_speculation(table: Table, found: Speculation) -> None:
    table.add_row("acceptance rate (%)", f"{found['spec_decode_acceptance_rate']:.2f}")
    table.add_row("acceptance length", f"{found['spec_decode_acceptance_length']:.2f}")
    table.add_row("drafts", f"{found['spec_decode_num_drafts']}")
    table.add_row("draft tokens", f"{found['spec_decode_draft_tokens']}")
    table.add_row("accepted tokens", f"{found['spec_decode_accepted_tokens']}")
    shares = found["spec_decode_per_position_acceptance_rates"]
    shown = " ".join(f"{100 * each:.1f}" for each in shares)
    table.add_row("per-position acceptance (%)", shown)


def latency(summary: Summary, name: str) -> Distribution:
    """The latency of a name of METRICS."""
    found = {
        "ttft": summary["ttft_ms"],
        "itl": summary["itl_ms"],
        "tpot": summary["tpot_ms"],
        "e2el": summary["e2e_ms"],
    }
    return found[name]


def read_goals(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500` and the like: milliseconds by name. Raises ValueError."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        if name not in METRICS:
            raise ValueError(f"{text}: not a goal; a goal is one of {', '.join(METRICS)}:<ms>")
        goals[name] = float(number)
        if not 0 < goals[name] < math.inf:
            raise ValueError(f"{text}: a goal is a number of milliseconds above 0")
    return goals
