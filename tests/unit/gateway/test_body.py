"""Bounds of a body are checked before it is parsed; a wrong body makes few errors."""

import json
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import pytest
from pydantic import ValidationError

from tokenmesh.services.gateway.apis.anthropic.request import MessagesRequest
from tokenmesh.services.gateway.apis.batches.lines import split_lines
from tokenmesh.services.gateway.apis.openai.batch_chat import BatchChatRequest
from tokenmesh.services.gateway.apis.openai.request import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.core.http.body import check_bounds, check_bounds_now, parse_body
from tokenmesh.services.gateway.core.http.fields import Bounded, Conversions
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

LIMIT = 8
SETTINGS = GatewaySettings(
    max_json_depth=LIMIT,
    max_json_values=1000,
    max_json_strings=400,
    max_json_names=350,
    max_json_objects=300,
)
DEFAULTS = GatewaySettings()
Body = TypeVar("Body", bound=Bounded)


async def parsed(model: type[Body], data: bytes) -> Body:
    return await parse_body(data, model, DEFAULTS, Conversions())


@pytest.mark.parametrize(
    "data",
    [
        b"[" * LIMIT + b"]" * LIMIT,
        b"[]" * 100,
        b'{"' + b"[" * 100 + b'": 1}',
        b'{"\\"' + b"[" * 100 + b'": 1}',
        b'["\\\\", ' + b'"{", ' * 100 + b"1]",
        # Not JSON: the parser reports it.
        b"[]" * 100 + b'"' + b"[" * 100,
        b"[]" * 100 + b'"' + b"[" * 100 + b"\\",
    ],
)
async def test_brackets_in_strings_or_side_by_side_add_no_depth(data: bytes) -> None:
    check_bounds_now(data, SETTINGS)
    await check_bounds(data, SETTINGS)


@pytest.mark.parametrize("data", [b"[" * (LIMIT + 1), b'["\\"", ' + b'{"a": ' * LIMIT])
def test_a_body_nested_too_deep_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="nested deeper than 8 levels"):
        check_bounds_now(data, SETTINGS)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"[" + b"1," * 1000 + b"1]", "values"),
        (b"[" + b'"",' * 500 + b'""]', "strings"),
        (b"{" + b'"":1,' * 500 + b'"":1}', "strings"),
        (b"{" + b'"::":1,' * 360 + b'"":1}', "names"),
        (b"[" + b"{}," * 400 + b"{}]", "objects"),
        (b"[" + b"[]," * 400 + b"[]]", "objects"),
    ],
)
def test_a_body_of_too_many_parts_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(PayloadTooLarge, match=f"more than .* {what}"):
        check_bounds_now(data, SETTINGS)


@pytest.mark.parametrize("shift", range(8))
def test_counts_do_not_depend_on_where_portions_end(shift: int) -> None:
    """Portions have 64 KiB; escapes of all lengths stand before their ends."""
    text = "x" * (64 * 1024 - 12 + shift) + '\\"[,{' * 40_000
    check_bounds_now(json.dumps({"a": text}).encode(), SETTINGS)
    with pytest.raises(InvalidInput, match="nested deeper"):
        check_bounds_now(json.dumps([text, [[[[[[[[[]]]]]]]]]]).encode(), SETTINGS)


def _growth(of: Callable[[int], bytes], run: Callable[[bytes], object]) -> float:
    """The ratio of times for 16 times the size; the best of several runs."""

    def best_s(data: bytes) -> float:
        times = []
        for _ in range(5):
            began_s = time.process_time()
            run(data)
            times.append(time.process_time() - began_s)
        return min(times)

    small, large = of(50_000), of(800_000)
    return best_s(large) / best_s(small)


@pytest.mark.parametrize("piece", [b"[],", b'"', b'\\"', b"\\", b"]", b"1,", b'"\\\\",'])
def test_the_time_grows_with_the_size(piece: bytes) -> None:
    no_limits = GatewaySettings(
        max_json_depth=10**9, max_json_values=10**9, max_json_strings=10**9, max_json_objects=10**9
    )
    begun = b'["' if piece == b'\\"' else b"["
    growth = _growth(
        lambda size: begun + piece * (size // len(piece)),
        lambda data: check_bounds_now(data, no_limits),
    )
    # 16 where the time is linear, 256 where it is quadratic.
    assert growth < 64


HOSTILE: list[tuple[type[Bounded], bytes]] = [
    (CompletionRequest, b'{"prompt":[%s-1]}' % (b"-1," * 100_000)),
    (CompletionRequest, b'{"prompt":[%s[-1]]}' % (b"[-1]," * 40_000)),
    (ChatRequest, b'{"messages":[%s1]}' % (b"1," * 200_000)),
    (ChatRequest, b'{"messages":[%s{}]}' % (b"{}," * 40_000)),
    (ChatRequest, b'{"messages":[{"role":"a","content":[%s1]}]}' % (b"1," * 200_000)),
    (ChatRequest, b'{"messages":[{"role":"a"}],"stop":[%s1]}' % (b"1," * 200_000)),
    (BatchChatRequest, b'{"messages":[[%s1]]}' % (b"1," * 200_000)),
    (MessagesRequest, b'{"model":"m","max_tokens":1,"messages":[%s1]}' % (b"{}," * 40_000)),
    (ResponsesRequest, b'{"input":[%s1]}' % (b"1," * 200_000)),
    (ResponsesRequest, b'{"input":"","include":[%s1]}' % (b'"x",' * 90_000)),
]
ENTRIES = b",".join(b'"%d":""' % index for index in range(60_000))
HOSTILE += [
    (ChatRequest, b'{"messages":[{"role":"a"}],"%s":{%s}}' % (name, ENTRIES))
    for name in (b"logit_bias", b"repetition_detection", b"structured_outputs", b"response_format")
]
HOSTILE += [(ResponsesRequest, b'{"input":"","metadata":{%s}}' % ENTRIES)]


@pytest.mark.parametrize(("model", "data"), HOSTILE)
async def test_many_wrong_elements_make_few_errors(model: type[Bounded], data: bytes) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(data)
    assert caught.value.error_count() < 200
    tracemalloc.start()
    with pytest.raises(InvalidInput):
        await parsed(model, data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 40 * len(data) + 2**20


async def test_too_many_ids_are_refused_before_they_are_read() -> None:
    data = b'{"model": "m", "prompt": [' + b"12345, " * (DEFAULTS.max_json_ids + 9) + b"1]}"
    tracemalloc.start()
    with pytest.raises(PayloadTooLarge, match="max_json_ids"):
        await parsed(CompletionRequest, data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < len(data) / 4


def _schemas(schema: Any) -> list[dict[str, Any]]:
    """The schema and all inner ones."""
    if isinstance(schema, list | tuple):
        return [found for each in schema for found in _schemas(each)]
    if not isinstance(schema, dict):
        return []
    return [schema, *(found for each in schema.values() for found in _schemas(each))]


def _models(base: type[Bounded] = Bounded) -> list[type[Bounded]]:
    return [base, *(found for each in base.__subclasses__() for found in _models(each))]


def test_validation_of_every_list_stops_at_its_first_error() -> None:
    lists = [
        (model.__name__, schema)
        for model in _models()
        for schema in _schemas(model.__pydantic_core_schema__)
        if schema.get("type") == "list"
    ]
    assert len(lists) > 30
    assert [name for name, schema in lists if not schema.get("fail_fast")] == []


IDS = [random.Random(1).randrange(150_000) for _ in range(60_000)]


@pytest.mark.parametrize(
    "prompt",
    [IDS, [IDS[:20_000], IDS[20_000:], [7]], [[2**32 - 1], IDS], [IDS, []], [IDS] * 3],
    ids=["one", "several", "a placeholder", "an empty one", "equal ones"],
)
async def test_long_lists_of_ids_read_in_portions_are_equal(prompt: Any) -> None:
    for indent in (None, 1):
        data = json.dumps({"prompt": prompt, "stop": ["a"]}, indent=indent).encode()
        body = await parsed(CompletionRequest, data)
        assert body.prompt == prompt
        assert body.stop == ["a"]
        assert body.prompts == (prompt if isinstance(prompt[0], list) else [prompt])


async def test_more_ids_than_values_are_allowed() -> None:
    tokens = IDS * 6
    data = json.dumps({"tokens": tokens}).encode()
    assert (await parsed(DetokenizeRequest, data)).tokens == tokens
    with pytest.raises(PayloadTooLarge, match="values"):
        await parsed(DetokenizeRequest, json.dumps({"tokens": [], "x": tokens}).encode())


async def test_a_text_that_looks_like_a_list_of_ids_stays_text() -> None:
    text = json.dumps(IDS[:20_000])
    messages = [{"role": "user", "content": text}]
    body = await parsed(
        ChatRequest, json.dumps({"messages": messages, "stop_token_ids": [1]}).encode()
    )
    assert body.messages == messages
    data = json.dumps({"prompt": [text, text], "stop_token_ids": IDS[:900]}).encode()
    assert (await parsed(CompletionRequest, data)).prompts == [text, text]


@pytest.mark.parametrize("wrong", ["-1", "1.5", "true", "01", "1 2", "", "4294967296"])
async def test_a_wrong_id_in_a_long_list_is_refused(wrong: str) -> None:
    data = '{"prompt":[' + "5," * 50_000 + wrong + ",5" * 50_000 + "]}"
    with pytest.raises(InvalidInput):
        await parsed(CompletionRequest, data.encode())


@pytest.mark.parametrize("padding", ["", " " * 200_000])
async def test_a_byte_order_mark_before_a_body_is_left_out(padding: str) -> None:
    text = json.dumps({"model": "m", "tokens": [1, 2]}) + padding
    body = await parsed(DetokenizeRequest, text.encode("utf-8-sig"))
    assert body.tokens == [1, 2]


async def test_a_byte_order_mark_before_a_batch_is_left_out() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"\xef\xbb\xbf{}\n{}"

    assert [line.data async for line in split_lines(chunks(), 100)] == [b"{}", b"{}"]
