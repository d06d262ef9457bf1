"""Rates come from counters that are read again and again."""

import math

from tests.unit.cli.test_mesh_commands import LOAD, process
from tokenmesh.cli.rates import Counts, MeshRates, quantile, read_counts, sparkline

METRICS = """\
# TYPE vllm:http_requests_total counter
vllm:http_requests_total{handler="/v1/models",method="GET",status="200"} 7.0
vllm:http_requests_total{handler="/v1/chat/completions",method="POST",status="503"} 2.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{model_name="a",engine="0",le="0.1"} 3.0
vllm:time_to_first_token_seconds_bucket{model_name="b",engine="0",le="0.1"} 1.0
vllm:time_to_first_token_seconds_bucket{model_name="a",engine="0",le="+Inf"} 5.0
"""


def test_counters_of_all_workers_and_models_are_summed_without_reads() -> None:
    loads = (LOAD, LOAD | {"decode_tokens": 20}, None)
    state = {"processes": [process(f"worker-{n}", load=load) for n, load in enumerate(loads)]}
    counts = read_counts(1.0, state, METRICS)
    assert counts == Counts(1.0, 29, 200, 2.0, 2.0, ((0.1, 4.0), (math.inf, 5.0)))
    assert read_counts(1.0, state, None).requests is None


def counts_at(second: float, tokens: int, requests: float | None = None) -> Counts:
    ttft = ((0.1, requests or 0.0), (0.2, 2 * (requests or 0.0)), (math.inf, 2 * (requests or 0.0)))
    return Counts(second, tokens, 10 * tokens, requests, 1.0 if second > 5 else 0.0, ttft)


def test_rates_are_those_of_the_last_seconds() -> None:
    rates = MeshRates()
    assert rates.summary() == ""
    for second in range(21):
        rates.add(counts_at(float(second), 100 * max(0, second - 10), float(second)))
    line = rates.summary()
    assert line.startswith("100 tokens/s ")
    assert "1000 prompt tokens/s   1.0 requests/s   TTFT p50 100 ms p95 190 ms   0 errors" in line


def test_without_metrics_only_the_load_of_workers_is_shown() -> None:
    rates = MeshRates()
    rates.add(counts_at(0.0, 0))
    rates.add(counts_at(2.0, 100))
    assert rates.summary() == "50 tokens/s \u2588   500 prompt tokens/s"


def test_a_counter_that_began_again_starts_a_new_window() -> None:
    rates = MeshRates()
    for second, tokens in ((0.0, 500), (1.0, 600), (2.0, 10)):
        rates.add(counts_at(second, tokens))
    assert rates.summary() == ""
    rates.add(counts_at(3.0, 30))
    assert rates.summary().startswith("20 tokens/s")


def test_a_quantile_is_interpolated_within_its_bucket() -> None:
    buckets = [(1.0, 10.0), (2.0, 20.0), (math.inf, 20.0)]
    assert quantile(buckets, 0.5) == 1.0
    assert quantile(buckets, 0.75) == 1.5
    assert quantile([(1.0, 0.0), (math.inf, 4.0)], 0.5) == 1.0
    assert quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5) is None
    assert quantile([], 0.5) is None


def test_a_sparkline_is_as_high_as_its_values() -> None:
    assert sparkline([0.0, 4.0, 8.0]) == "\u2581\u2585\u2588"
    assert sparkline([0.0, 0.0]) == "\u2581\u2581"
    assert sparkline([]) == ""
