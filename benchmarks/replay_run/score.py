"""Score: the numbers of one replay."""

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from benchmarks.replay_run.player import PlayedRequest
from tokenmesh.cli.bench.report import percentile


class Score(TypedDict):
    """Times are seconds of the trace, shares lie in [0, 1]."""

    requests: int
    errors: dict[str, int]
    hit_rate: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    under_bound: float
    """The share of all requests, failed ones included, with a first token within the bound."""
    late_max: float
    """The worst delay of our own sender."""


def score(played: Sequence[PlayedRequest], bound_s: float) -> Score:
    """Latencies are those of requests without an error."""
    good = [each for each in played if each.error is None]
    firsts = sorted(each.first_s for each in good if each.first_s is not None)
    prompt_tokens = sum(each.prompt_tokens for each in good)
    cached = sum(each.cached_tokens for each in good)
    return Score(
        requests=len(played),
        errors=dict(Counter(each.error for each in played if each.error is not None)),
        hit_rate=round(cached / max(1, prompt_tokens), 4),
        ttft_p50=round(percentile(firsts, 50), 3),
        ttft_p90=round(percentile(firsts, 90), 3),
        ttft_p99=round(percentile(firsts, 99), 3),
        under_bound=round(sum(each < bound_s for each in firsts) / max(1, len(played)), 4),
        late_max=round(max((each.late_s for each in played), default=0.0), 3),
    )
