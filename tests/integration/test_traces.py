"""One request through five processes is one tree of spans: names, parents and services, pinned."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_openmetrics,
)

from tests.e2e.mesh_process import mesh
from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.llava import llava
from tokenmesh.cli.embedded.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MODEL = "llava"
TRACE_S = 10.0
OUTPUT_TOKENS = 5

Trace = Mapping[str, Any]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of `tokenmesh up` with a tiny llava checkpoint."""
    checkpoint = str(llava(tmp_path_factory.mktemp("llava")))
    flags = f"--served-model-name {MODEL} --dtype float32 --max-num-batched-tokens 16"
    with (
        mesh(free_port(), checkpoint, *flags.split()) as running,
        httpx.Client(base_url=running.url, timeout=30, trust_env=False) as client,
    ):
        yield client


def trace_of(gateway: httpx.Client, request_id: str) -> Trace:
    """The trace, once its first span (which ends last) has arrived and nothing follows."""
    give_up_s = time.monotonic() + TRACE_S
    seen = -1
    while time.monotonic() < give_up_s:
        answer = gateway.get(f"/traces/{request_id}")
        spans = answer.json()["spans"] if answer.status_code == 200 else []
        if len(spans) == seen and any(span["name"] == "http" for span in spans):
            return dict(answer.json())
        seen = len(spans)
        # Longer than a span waits for others to be sent with.
        time.sleep(0.5)
    raise AssertionError(f"no whole trace of {request_id}: {answer.text}")


def outline(trace: Trace) -> list[str]:
    """The tree as indented lines, children in order of their beginning."""
    spans = trace["spans"]
    known = {span["span_id"] for span in spans}
    lines: list[str] = []

    def walk(parent: str | None, depth: int) -> None:
        for span in spans:
            if (span["parent_id"] if span["parent_id"] in known else None) == parent:
                lines.append(f"{'  ' * depth}{span['name']} @{span['service']}")
                walk(span["span_id"], depth + 1)

    walk(None, 0)
    return lines


def chat(gateway: httpx.Client, content: object, **fields: object) -> str:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    answer = gateway.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_a_chat_with_an_image_is_one_tree_over_five_processes(gateway: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": data_uri(image_file(picture()))}}
    request_id = chat(gateway, [image, {"type": "text", "text": "What is this?"}])
    trace = trace_of(gateway, request_id)
    assert outline(trace) == [
        "http @gateway",
        "  validate @gateway",
        "    describe @tokenizer",
        "    read @tokenizer",
        "  tokenize @gateway",
        "    tokenize @tokenizer",
        "      media @tokenizer",
        "        fetch @tokenizer",
        "        preprocess @tokenizer",
        "      render @tokenizer",
        "      encode @tokenizer",
        "      hash @tokenizer",
        "  encode_media @gateway",
        "    encode_media @encoder",
        "      tower @encoder",
        "  place @gateway",
        "    place @scheduler",
        "  generate @gateway",
        "    generate @worker",
        "      merge @worker",
        "    worker.queue @worker",
        "    worker.prefill @worker",
        "    worker.prefill @worker",
        "    worker.prefill @worker",
        "    worker.prefill @worker",
        "    worker.decode @worker",
        "  detokenize @gateway",
        "  flush @gateway",
    ]
    assert len({span["instance"] for span in trace["spans"]}) == 5
    (root,) = (span for span in trace["spans"] if span["parent_id"] is None)
    assert root["attributes"]["tokenmesh.request_id"] == request_id


def test_a_chats_span_has_the_names_for_generative_ai_and_its_latencies_lead_to_it(
    gateway: httpx.Client,
) -> None:
    request_id = chat(gateway, "Hello", n=2)
    trace = trace_of(gateway, request_id)
    (root,) = (span for span in trace["spans"] if span["parent_id"] is None)
    found = {
        name: value for name, value in root["attributes"].items() if name.startswith("gen_ai.")
    }
    assert found.pop("gen_ai.usage.input_tokens") > 0
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tokenmesh",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": request_id,
        "gen_ai.request.max_tokens": OUTPUT_TOKENS,
        "gen_ai.usage.output_tokens": 2 * OUTPUT_TOKENS,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    metrics = read_openmetrics(gateway.get("/metrics", headers=accept).text)  # type: ignore[no-untyped-call]
    exemplars = {
        (family.name, sample.exemplar.labels["trace_id"])
        for family in metrics
        for sample in family.samples
        if sample.exemplar
    }
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert (f"tokenmesh:{name}", trace["trace_id"]) in exemplars


def test_a_streamed_chat_without_media_skips_the_encoder(gateway: httpx.Client) -> None:
    chat(gateway, "warm up")
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    answer = gateway.post("/v1/chat/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    trace = trace_of(gateway, answer.headers["x-request-id"])
    assert outline(trace) == [
        "http @gateway",
        "  validate @gateway",
        "  tokenize @gateway",
        "    tokenize @tokenizer",
        "      render @tokenizer",
        "      encode @tokenizer",
        "      hash @tokenizer",
        "  place @gateway",
        "    place @scheduler",
        "  generate @gateway",
        "    generate @worker",
        "    worker.queue @worker",
        "    worker.prefill @worker",
        "    worker.prefill @worker",
        "    worker.decode @worker",
        "  detokenize @gateway",
        "  flush @gateway",
    ]


def test_the_spans_say_where_the_time_went_and_why(gateway: httpx.Client) -> None:
    trace = trace_of(gateway, chat(gateway, "Say something."))
    spans = {(span["name"], span["service"]): span for span in trace["spans"]}
    http, decode = spans["http", "gateway"], spans["worker.decode", "worker"]
    assert all(
        http["start_ns"] <= span["start_ns"] <= span["end_ns"] <= http["end_ns"]
        for span in trace["spans"]
    )
    assert [event["name"] for event in decode["events"]] == ["step"] * OUTPUT_TOKENS
    assert decode["attributes"]["output_tokens"] == OUTPUT_TOKENS
    (candidate,) = spans["place", "gateway"]["events"]
    assert (
        candidate["attributes"]["worker"]
        == spans["place", "gateway"]["attributes"]["tokenmesh.worker"]
    )
    assert spans["detokenize", "gateway"]["attributes"]["busy_ms"] > 0


def test_a_client_that_brings_a_traceparent_finds_its_own_trace(gateway: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    trace_id, span_id = "c" * 32, "d" * 16
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01", "x-request-id": "mine-1"}
    answer = gateway.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.headers["traceparent"].startswith(f"00-{trace_id}-")
    trace = trace_of(gateway, "mine-1")
    assert trace["trace_id"] == trace_id
    (root,) = (span for span in trace["spans"] if span["name"] == "http")
    assert root["parent_id"] == span_id
