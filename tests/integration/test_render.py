"""The render routes through a real gateway, with a fake tokenizer."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd
from tests.fakes.key_file import key_entry
from tests.fakes.parsers import PLUGINS
from tests.fakes.three_calls import GENERATE, announce_tokenizer
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import MediaItem

WARNINGS = "x-tokenmesh-warning"
CHAT = "/v1/chat/completions/render"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(
        bus_settings, redis_settings, scale_out=True, parser_plugins=PLUGINS, service_wait_s=0.5
    ) as back_end:
        await announce_tokenizer(back_end)
        yield back_end


def chat(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    return {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}], **fields}


async def render(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_chat_is_rendered_with_every_default_filled_in(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.tokenizer.defaults = {"temperature": 0.25, "top_k": 7}
    body = chat(mesh, top_p=0.5, stop="x", logit_bias={"5": 2}, bad_words=["no"], stream=True)
    rendered = await render(client, CHAT, body | {"kv_transfer_params": {"a": [1]}, "priority": 2})
    assert rendered["request_id"].startswith("chatcmpl-")
    assert (rendered["model"], rendered["stream"], rendered["priority"]) == (mesh.model, True, 2)
    assert rendered["kv_transfer_params"] == {"a": [1]}
    sampling = rendered["sampling_params"]
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (0.25, 7, 0.5)
    assert (sampling["stop"], sampling["logit_bias"]) == (["x"], {"5": 2.0})
    assert sampling["max_tokens"] == MAX_MODEL_LEN - len(rendered["token_ids"])
    assert sampling["seed"] is None
    assert rendered["rendered"]["bad_words_token_ids"]
    assert not mesh.scheduler.received


async def test_constraints_are_rendered_with_the_place_where_they_begin(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.tokenizer.reasoning_parser = "brackets"
    mesh.tokenizer.tool_call_parser = "bracket_calls"
    body = chat(mesh, tools=[TOOL], tool_choice="required")
    rendered = await render(client, CHAT, body)
    outputs = rendered["sampling_params"]["structured_outputs"]
    assert next(iter(outputs)) in ("json", "structural_tag")
    assert rendered["reasoning_ended"] is (not rendered["rendered"]["reasoning_end_token_ids"])
    assert rendered["reasoning_parser_kwargs"] == {"chat_template_kwargs": {}}
    direct = await client.post("/v1/chat/completions", json=body | {"seed": 1})
    assert direct.status_code == 200, direct.text
    assert (await client.post(GENERATE, json=rendered)).status_code == 200
    one, other = (each.sampling.structured for each in mesh.workers[0].generates)
    assert one is not None
    assert other is not None
    assert (one.kind, one.text, one.after) == (other.kind, other.text, other.after)


async def test_places_of_tokens_are_rendered_where_they_are_wanted(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    for path, body in (
        (CHAT, chat(mesh)),
        ("/v1/completions/render", {"model": mesh.model, "prompt": ["Hi", "Ho"]}),
    ):
        for wanted in (None, False, True):
            response = await client.post(path, json=body | {"return_token_offsets": wanted})
            assert response.status_code == 200, response.text
            assert WARNINGS not in response.headers
            found = response.json()
            for each in found if isinstance(found, list) else [found]:
                places = [[0, 1]] * len(each["token_ids"]) if wanted else None
                assert each["token_offsets"] == places
    # elsewhere the field is harmless, and said to be without effect
    body = chat(mesh) | {"return_token_offsets": True}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert "return_token_offsets ignored" in response.headers[WARNINGS]


async def test_every_api_is_rendered_as_its_own_route_reads_it(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    message = {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}]}
    first = await render(client, CHAT, chat(mesh))
    second = await render(client, "/v1/messages/render", message | {"max_tokens": 5})
    third = await render(
        client,
        "/v1/responses/render",
        {"model": mesh.model, "input": "Hi", "kv_transfer_params": {"b": 2}},
    )
    assert first["token_ids"] == second["token_ids"] == third["token_ids"]
    assert second["sampling_params"]["max_tokens"] == 5
    assert second["request_id"].startswith("msg")
    assert third["request_id"].startswith("resp")
    assert third["kv_transfer_params"] == {"b": 2}
    prompts = {"model": mesh.model, "prompt": [[7], [5, 6]], "max_tokens": 3}
    several = await render(client, "/v1/completions/render", prompts)
    assert several[1]["token_ids"] == [5, 6]
    assert [each["request_id"][-2:] for each in several] == ["-0", "-1"]


async def test_requests_that_cannot_be_rendered_are_refused_by_name(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    response = {"model": mesh.model, "input": "Hi"}
    completion = {"model": mesh.model, "prompt": "Hi"}
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("use_beam_search", CHAT, chat(mesh, use_beam_search=True)),
        ("use_beam_search", "/v1/completions/render", completion | {"use_beam_search": True}),
        ("prompt_embeds", "/v1/completions/render", completion | {"prompt_embeds": "AAAA"}),
        (
            "previous_response_id",
            "/v1/responses/render",
            response | {"previous_response_id": "resp_1"},
        ),
        ("temperature", CHAT, chat(mesh, temperature=-1)),
        ("max_tokens", CHAT, chat(mesh, max_tokens=10_000)),
    ]
    for param, path, body in wrong:
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    item = MediaItem(kind="image", content_hash="0", offset=0, length=1, pixels=BlobKey("k"))
    mesh.tokenizer.media = [item]
    refused = await client.post(CHAT, json=chat(mesh))
    assert refused.status_code == 400
    assert "media are not supported by the render endpoint" in refused.text
    assert (await client.post(CHAT, json=chat(mesh) | {"model": "none"})).status_code == 404


async def test_a_tenants_limit_holds_for_rendering(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    mark, path = secrets.token_hex(4), tmp_path / "keys.toml"
    entry = key_entry(f"sk-{mark}", f"slow-{mark}")
    path.write_text(f"[tenants.slow-{mark}]\nrequests_per_minute = 2\n{entry}")
    headers = {"authorization": f"Bearer sk-{mark}"}
    async with (
        BackEnd(bus_settings, redis_settings, scale_out=True, keys_file=path) as mesh,
        httpx.AsyncClient(base_url=mesh.url, headers=headers) as client,
    ):
        codes = [(await client.post(CHAT, json=chat(mesh))).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        body = {"model": mesh.model, "token_ids": [5], "sampling_params": {}}
        assert (await client.post(GENERATE, json=body)).status_code == 429


async def test_ids_have_the_kind_of_the_answer_before_the_clients(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    own = {"x-request-id": "abc"}

    async def ids(path: str, body: dict[str, Any]) -> Any:
        response = await client.post(path, json=body, headers=own)
        assert (response.status_code, response.headers["x-request-id"]) == (200, "abc")
        rendered = response.json()
        several = rendered if isinstance(rendered, list) else [rendered]
        return [each["request_id"] for each in several]

    prompts = {"model": mesh.model, "prompt": [[7], [5, 6]], "max_tokens": 3}
    assert await ids(CHAT, chat(mesh)) == ["chatcmpl-abc"]
    assert await ids("/v1/completions/render", prompts) == ["cmpl-abc-0", "cmpl-abc-1"]
    assert await ids("/v1/completions/render", prompts | {"prompt": "x"}) == ["cmpl-abc"]
    response = {"model": mesh.model, "input": "Hi"}
    [made] = await ids("/v1/responses/render", response)
    assert made.startswith("resp_")


async def test_what_a_response_would_need_stored_has_vllms_type_of_error(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = {"model": mesh.model, "input": "Hi", "previous_response_id": "resp_1"}
    error = (await client.post("/v1/responses/render", json=body)).json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "not_supported")


async def test_hidden_reasoning_is_said_to_have_ended(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.tokenizer.reasoning_parser = "brackets"
    body = chat(mesh, response_format={"type": "json_object"})
    for shown in (True, False):
        rendered = await render(client, CHAT, body | {"include_reasoning": shown})
        ends = rendered["rendered"]["reasoning_end_token_ids"]
        assert rendered["reasoning_ended"] is (not shown or not ends)
