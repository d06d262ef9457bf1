"""The table of metrics, a process's registry, and the endpoint."""

import asyncio
import socket
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

import tokenmesh
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.metrics import (
    ENGINE_METRICS,
    METRICS,
    Metric,
    Metrics,
    join_samples,
    sample_lines,
)
from tokenmesh.shared.metrics.endpoint import MetricsEndpoint, start_metrics_endpoint

MODEL = {"model_name": "demo", "engine": "worker-1"}


def lines(metrics: Metrics) -> list[str]:
    return metrics.render().decode().splitlines()


def test_names_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


def test_the_metrics_that_dashboards_of_vllm_read_are_there() -> None:
    names = {metric.name for metric in METRICS}
    assert names >= {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "iteration_tokens_total",
    }


def test_samples_of_several_processes_are_one_text_with_each_head_once() -> None:
    first, second = Metrics(), Metrics("other")
    for metrics, engine in ((first, "a"), (second, 'b"\n#')):
        labels = {"model_name": "m", "engine": engine}
        metrics.counter("generation_tokens", **labels).inc(3)
        metrics.histogram("iteration_tokens_total", **labels).observe(9)
        metrics.gauge("worker_sleep_level", **labels).set(1)
    lines = [sample_lines(each, ENGINE_METRICS) for each in (first, second)]
    text = join_samples(ENGINE_METRICS, [*lines, {}], "vllm:").decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families.keys() == {"vllm:generation_tokens", "vllm:iteration_tokens_total"}
    assert text.count("# TYPE") == 2
    for family in families.values():
        assert {sample.labels["engine"] for sample in family.samples} == {"a", 'b"\n#'}
    counts = families["vllm:iteration_tokens_total"].samples
    assert sum(sample.value for sample in counts if sample.name.endswith("_count")) == 2


def test_openmetrics_has_exemplars_and_the_metrics_of_other_processes() -> None:
    metrics, other = Metrics(), Metrics()
    ttft = metrics.histogram("time_to_first_token_seconds", **MODEL)
    ttft.observe(0.2, {"trace_id": "ab" * 16})
    metrics.counter("cancelled_requests").inc()
    other.counter("generation_tokens", **MODEL).inc(3)
    lines = sample_lines(other, ENGINE_METRICS)

    def others(is_open: bool) -> bytes:
        return join_samples(ENGINE_METRICS, [lines], "tokenmesh:", is_open)

    text, media_type = metrics.render_with(others, "application/openmetrics-text; version=1.0.0")
    assert media_type.startswith("application/openmetrics-text")
    families = {each.name: each for each in read_openmetrics(text.decode())}  # type: ignore[no-untyped-call]
    exemplars = [
        each.exemplar.labels
        for each in families["tokenmesh:time_to_first_token_seconds"].samples
        if each.exemplar
    ]
    assert exemplars == [{"trace_id": "ab" * 16}]
    assert families["tokenmesh:generation_tokens"].samples[0].value == 3
    plain, media_type = metrics.render_with(others, "text/plain")
    assert media_type.startswith("text/plain")
    assert plain == metrics.render() + others(False)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_metric_can_be_made_and_scraped(metric: Metric) -> None:
    metrics = Metrics()
    labels = dict.fromkeys(metric.labels, "x")
    if metric.kind == "counter":
        metrics.counter(metric.name, **labels).inc()
    elif metric.kind == "gauge":
        metrics.gauge(metric.name, **labels).set(1)
    else:
        metrics.histogram(metric.name, **labels).observe(metric.buckets[0])
        assert list(metric.buckets) == sorted(metric.buckets)
    assert f"# TYPE tokenmesh:{metric.name}" in metrics.render().decode()


def test_every_metric_is_measured_somewhere() -> None:
    package = Path(tokenmesh.__file__).parent
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
        if path.parent.name != "metrics"
    )
    assert [metric.name for metric in METRICS if f'"{metric.name}"' not in code] == []


def test_a_counter_counts_under_its_labels() -> None:
    metrics = Metrics()
    metrics.counter("request_success", **MODEL, finished_reason="stop").inc()
    metrics.counter("request_success", **MODEL, finished_reason="stop").inc()
    metrics.counter("request_success", **MODEL, finished_reason="length").inc()
    found = [line for line in lines(metrics) if line.startswith("tokenmesh:request_success_total{")]
    assert sorted(found) == [
        'tokenmesh:request_success_total{engine="worker-1",finished_reason="length",'
        'model_name="demo"} 1.0',
        'tokenmesh:request_success_total{engine="worker-1",finished_reason="stop",'
        'model_name="demo"} 2.0',
    ]


def test_two_registries_share_nothing() -> None:
    first, second = Metrics(), Metrics()
    first.counter("resends").inc(5)
    assert "tokenmesh:resends_total 5.0" in lines(first)
    assert not any("resends" in line for line in lines(second))


def test_a_gauge_can_be_read_when_it_is_scraped() -> None:
    metrics = Metrics()
    waiting = [1]
    metrics.gauge_of("open_streams", lambda: len(waiting))
    waiting.append(2)
    assert "tokenmesh:open_streams 2.0" in lines(metrics)


def test_a_wrong_name_label_or_kind_is_an_error() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.counter("requests_that_are_undeclared")
    with pytest.raises(ValueError, match="label"):
        metrics.gauge("num_requests_running", color="red")
    with pytest.raises(AssertionError, match="is not a counter"):
        metrics.counter("open_streams")


def test_the_process_itself_is_measured_on_demand() -> None:
    metrics = Metrics()
    metrics.watch_process()
    text = metrics.render().decode()
    assert "process_resident_memory_bytes" in text
    assert "python_gc_collections_total" in text


async def test_the_endpoint_serves_the_metrics_and_closes_its_port() -> None:
    metrics = Metrics()
    metrics.counter("resends").inc()
    endpoint = MetricsEndpoint.start(metrics, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{endpoint.port}/metrics"

    def fetch(accept: str) -> str:
        with urlopen(Request(url, headers={"Accept": accept}), timeout=5) as response:
            assert response.headers["Content-Type"].startswith(accept)
            return str(response.read().decode())

    for accept in ("text/plain", "application/openmetrics-text"):
        assert "tokenmesh:resends_total 1.0" in await asyncio.to_thread(fetch, accept)
    await endpoint.stop()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", endpoint.port)) != 0


def test_a_taken_port_is_a_config_error_that_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = TelemetrySettings(metrics_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="Address already in use") as caught:
            start_metrics_endpoint(Metrics(), settings)
    assert caught.value.param == "telemetry.metrics_port"


def test_port_zero_means_no_endpoint() -> None:
    assert start_metrics_endpoint(Metrics(), TelemetrySettings()) is None


def test_a_series_that_was_removed_begins_again() -> None:
    metrics = Metrics()
    metrics.counter("tenant_requests", tenant="a", outcome="admitted").inc(3)
    metrics.forget("tenant_requests", tenant="a", outcome="admitted")
    metrics.counter("tenant_requests", outcome="admitted", tenant="a").inc()
    labels = '{outcome="admitted",tenant="a"}'
    assert f"tokenmesh:tenant_requests_total{labels} 1.0" in lines(metrics)


def test_labels_that_are_not_the_tables_are_refused() -> None:
    metrics = Metrics()
    for _ in range(2):
        with pytest.raises(ValueError, match="label"):
            metrics.counter("tenant_requests", tenant="a")
