"""A gateway's /metrics has the workers' metrics under the names of vLLM."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.small_mesh import SmallMesh
from tests.servers import Server, bus_settings_of, redis_settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "engine_sleep_state",
    "cache_config_info",
    "kv_cache_usage_perc",
    "prompt_tokens",
    "prompt_tokens_cached",
    "prompt_tokens_by_source",
    "prompt_tokens_cached_by_source",
    "prompt_tokens_recomputed",
    "admission_rejections",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "iteration_tokens_total",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
}
"""The metrics of vLLM that every text model has."""

PREFIXES = ("tokenmesh", "vllm")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PREFIXES)
async def mesh(
    request: pytest.FixtureRequest,
    nats_server: Server,
    redis_server: Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[SmallMesh]:
    made = SmallMesh(
        tmp_path_factory.mktemp("mesh"),
        bus_settings_of(nats_server),
        redis_settings_of(redis_server),
        gateway={"metrics_interval_s": 0.0, "metrics_wait_s": 0.3},
        telemetry={"metrics_prefix": request.param},
    )
    await made.add_worker()
    async with made:
        yield made


async def families(mesh: SmallMesh) -> dict[str, Any]:
    """By name without the prefix; each name is unique."""
    text = (await mesh.client.get("/metrics")).text
    found: dict[str, Any] = {}
    prefix = f"{mesh.settings.telemetry.metrics_prefix}:"
    for family in text_string_to_metric_families(text):
        if family.name.startswith(prefix) and not family.name.endswith("_created"):
            name = family.name.removeprefix(prefix)
            assert name not in found
            found[name] = family
    return found


def total(family: Any, suffix: str) -> float:
    samples = [each.value for each in family.samples if each.name.endswith(suffix)]
    return float(sum(samples))


async def test_a_gateway_has_the_engines_metrics_by_the_names_of_vllm(mesh: SmallMesh) -> None:
    before = await families(mesh)
    for _ in range(6):
        assert (await mesh.complete()).status_code == 200
    await mesh.until(lambda: all(load.running == 0 for load in mesh.loads()))
    after = await families(mesh)
    assert after.keys() >= NAMES
    engines = {str(each.instance_id) for each in mesh.workers}
    for name in ("num_requests_running", "kv_cache_usage_perc", "prompt_tokens"):
        labels = [sample.labels for sample in after[name].samples]
        assert {each["engine"] for each in labels} == engines
        assert {each["model_name"] for each in labels} == {mesh.model}
    generated = total(after["generation_tokens"], "_total")
    assert generated - total(before["generation_tokens"], "_total") == 6 * 8
    steps = total(after["iteration_tokens_total"], "_count")
    assert steps > total(before["iteration_tokens_total"], "_count")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_response_has_the_load_that_a_proxy_requests(
    mesh: SmallMesh, is_stream: bool
) -> None:
    async def header(asked: str) -> Any:
        body = {"model": mesh.model, "prompt": "Hi", "max_tokens": 2, "stream": is_stream}
        headers = {"endpoint-load-metrics-format": asked}
        response = await mesh.client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200
        return response.headers.get("endpoint-load-metrics")

    names = ["kv_cache_usage_perc", "num_requests_waiting"]
    answer = await header("JSON")
    values = json.loads(answer.removeprefix("JSON "))["named_metrics"]
    assert list(values) == names
    assert all(0 <= value <= 1 for value in values.values())
    text = await header("text")
    assert text.startswith("TEXT ")
    pairs = [each.split("=") for each in text.removeprefix("TEXT ").split(", ")]
    assert [name for name, _ in pairs] == [f"named_metrics.{name}" for name in names]
    assert await header("BINARY") is None


async def test_a_worker_that_does_not_answer_keeps_its_metrics(mesh: SmallMesh) -> None:
    await mesh.complete()
    before = await families(mesh)
    await mesh.workers[0].bus.close()
    async with asyncio.timeout(15):
        after = await families(mesh)
    engines = {sample.labels["engine"] for sample in after["generation_tokens"].samples}
    assert engines == {sample.labels["engine"] for sample in before["generation_tokens"].samples}
    await mesh.until(lambda: len(mesh.loads()) == 1)
    left = await families(mesh)
    engines = {sample.labels["engine"] for sample in left["generation_tokens"].samples}
    assert engines == {str(mesh.workers[1].instance_id)}


async def test_a_last_token_behind_a_cached_prompt_is_counted(mesh: SmallMesh) -> None:
    """A prompt of whole blocks and one more token, which its first request leaves in the cache."""
    block = mesh.settings.worker.block_size
    prompt = list(range(20, 20 + 2 * block + 1))
    before = total((await families(mesh))["prompt_tokens_recomputed"], "_total")
    for _ in range(6):  # of two workers one has seen it then
        assert (await mesh.complete(prompt=prompt)).status_code == 200
    await mesh.until(lambda: all(load.running == 0 for load in mesh.loads()))
    after = total((await families(mesh))["prompt_tokens_recomputed"], "_total")
    assert after - before >= 4
