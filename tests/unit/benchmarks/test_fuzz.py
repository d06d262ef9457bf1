"""The fuzzer's parts: bodies that fit, mutations that do not, payloads that are no message."""

import asyncio
import json
from random import Random
from typing import Any

import jsonschema
import msgspec
import pytest

from benchmarks.fuzz_run.bus import BusFuzzer
from benchmarks.fuzz_run.http import HttpFuzzer
from benchmarks.fuzz_run.lag import count_held
from benchmarks.fuzz_run.mutate import mutate, spoil
from benchmarks.fuzz_run.schema import BodyMaker, operations
from tests.fakes.scripted_http import serving, stream
from tokenmesh.cli.bench.client import Target
from tokenmesh.shared import codec
from tokenmesh.shared.messages import Ping

ITEM: dict[str, Any] = {
    "type": "object",
    "required": ["kind"],
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "next": {"anyOf": [{"$ref": "#/components/schemas/Item"}, {"type": "null"}]},
        "count": {"type": "integer", "minimum": 2, "maximum": 5},
    },
}
DOCUMENT: dict[str, Any] = {
    "components": {"schemas": {"Item": ITEM}},
    "paths": {
        "/items/{id}": {
            "post": {
                "requestBody": {
                    "content": {
                        "application/json": {"schema": {"$ref": "#/components/schemas/Item"}}
                    }
                }
            },
            "get": {},
        }
    },
}


def maker(seed: int) -> BodyMaker:
    return BodyMaker(DOCUMENT, Random(seed), {})


def test_bodies_fit_their_schema() -> None:
    posted, got = operations(DOCUMENT)
    assert (posted.method, got.content_type) == ("POST", "")
    for seed in range(50):
        jsonschema.validate(maker(seed).make(posted.schema), {**DOCUMENT, **posted.schema})


def test_mutations_change_bodies_and_some_are_large() -> None:
    body = {"prompt": ["a"], "n": 1, "stop": None}
    seen = [json.dumps(mutate(body, Random(seed), 50_000)) for seed in range(300)]
    assert len(set(seen)) > 100
    assert 10_000 < max(map(len, seen)) < 200_000
    assert body == {"prompt": ["a"], "n": 1, "stop": None}


def test_spoiled_bytes_come_in_many_forms() -> None:
    assert len({spoil(b'{"a": [1, 2, 3]}', Random(seed)) for seed in range(200)}) > 100


def test_nothing_on_the_bus_decodes_to_a_message() -> None:
    link: Any = None
    fuzzer = BusFuzzer(link, ["worker-1"], "m", Random(1), 10_000)
    for _ in range(300):
        data = fuzzer.payload()
        assert len(data) < 10_000
        with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
            fuzzer._decode(data)
    assert fuzzer._decode(codec.encode(Ping())) == Ping()


async def test_server_errors_are_kept_with_their_request() -> None:
    def answer(_path: str, _body: dict[str, object]) -> bytes:
        return stream([]).replace(b"200 OK", b"500 Oops")

    async with serving(answer) as url:
        server = Target(url, "key")
        fuzzer = HttpFuzzer(server, server, operations(DOCUMENT), maker(1), Random(3), 5000)
        async with asyncio.timeout(10):
            while not fuzzer.wrong:
                await fuzzer.send_one()
    assert fuzzer.wrong[0].startswith("500 to ")
    assert b"Bearer key" in fuzzer._request(operations(DOCUMENT)[0])


def test_the_lag_of_a_loop_is_read_from_its_metric() -> None:
    name = "tokenmesh:event_loop_lag_seconds"
    text = f'{name}_bucket{{le="0.1"}} 7.0\n{name}_bucket{{le="+Inf"}} 9.0\n{name}_count 9.0\n'
    assert count_held(text.encode()) == 2
    assert count_held(b"other_count 3\n") is None
