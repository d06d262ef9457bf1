"""The result of one measurement of one engine."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from tokenmesh.cli.bench.load import Outcome
from tokenmesh.cli.bench.report import summarize


class Sample(msgspec.Struct, frozen=True):
    """Some streams at once, from the first request to the last token."""

    tokens_per_s: float
    """Output tokens over the whole time, prefill included."""
    decode_tokens_per_s: float
    """Output tokens a second once every stream has its first."""
    ttft_p50_ms: float
    client_share: float = 0.0
    """The share of all cores' time that the client took which asked over HTTP."""


Measure = Callable[[list[list[int]], int], Awaitable[Sample]]
"""(prompts, output tokens of each) -> Sample. Raises RuntimeError when a request fails."""


def sample_of(outcomes: Sequence[Outcome]) -> Sample:
    """Raises RuntimeError when a request failed."""
    summary = summarize(outcomes)
    if summary["errors"]:
        raise RuntimeError(f"requests failed: {summary['errors']}")
    return Sample(
        tokens_per_s=summary["output_tokens_per_s"],
        decode_tokens_per_s=round(decode_rate([each.token_times for each in outcomes]), 2),
        ttft_p50_ms=summary["ttft_ms"]["percentiles"]["p50"],
    )


def decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second after the last stream's first token; 0 when none came after it."""
    start = max((each[0] for each in times if each), default=0.0)
    after = [moment for each in times for moment in each if moment > start]
    return len(after) / (max(after) - start) if after else 0.0
