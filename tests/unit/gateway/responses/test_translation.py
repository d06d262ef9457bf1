"""Requests of the Responses API as chats, and errors with the client's paths."""

import json
import time
from typing import Any

import pytest
from pydantic import ValidationError

from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.tools import ServerTool
from tokenmesh.services.gateway.apis.responses.translation import ResponsesTranslation, translate
from tokenmesh.services.gateway.core.http.errors import invalid_fields
from tokenmesh.shared.errors import FieldPath, InvalidInput, TokenMeshError, field_name

USER: Any = {"role": "user", "content": "Hi"}
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c1", "output": "4"}
FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SERVER: Any = {"type": "mcp", "server_label": "docs", "server_url": "http://docs"}
FIND = ServerTool(server_label="docs", name="find", function_name="docs_find")


def read(**fields: Any) -> ResponsesRequest:
    try:
        return ResponsesRequest.model_validate({"input": "Hi", **fields})
    except ValidationError as error:
        raise invalid_fields(error) from None


def messages_of(items: Any, **fields: Any) -> list[Any]:
    return list(translate(read(input=items, **fields)).chat.messages)


def test_a_string_is_a_user_s_message() -> None:
    reported = messages_of("Hello", instructions="Be kind")
    assert reported == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Hello"},
    ]


def test_items_of_one_turn_are_one_message() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "See"}]}
    reported = messages_of([USER, reasoning, said, CALL, {**CALL, "call_id": "c2"}, OUTPUT, said])
    assert [each["role"] for each in reported] == ["user", "assistant", "tool", "assistant"]
    turn = reported[1]
    assert (turn["reasoning"], turn["content"]) == ("hm", "See")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert reported[2] == {"role": "tool", "tool_call_id": "c1", "content": "4"}


def test_encrypted_reasoning_is_omitted() -> None:
    hidden = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "xyz"}
    assert messages_of([hidden, USER]) == [USER]


def test_turns_are_kept_apart() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
    reported = messages_of([USER, CALL, thought, {"role": "assistant", "content": "a"}])
    assert [each.get("content") for each in reported] == ["Hi", "", "a"]
    assert reported[2]["reasoning"] == "so"
    said = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert [each["content"] for each in messages_of([USER, *said])] == ["Hi", "a", "b"]


def test_leading_system_messages_are_one() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "Be short"}]}
    reported = messages_of([developer, USER, developer], instructions="Be kind")
    assert [each["content"] for each in reported] == [
        "Be kind\n\nBe short",
        "Hi",
        "Be short",
    ]
    assert reported[2]["role"] == "system"


def test_system_messages_with_images_stay_as_they_are() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,xyz"}
    first = {"role": "system", "content": [{"type": "input_text", "text": "See"}, image]}
    reported = messages_of([first, {"role": "system", "content": "Be kind"}, USER])
    assert [part["type"] for part in reported[0]["content"]] == ["text", "image_url"]
    assert [each["content"] for each in reported[1:]] == ["Be kind", "Hi"]


def test_images_and_text_are_parts() -> None:
    parts = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": "https://a/b.png", "detail": "high"},
        {"type": "input_image", "file_id": "file-1", "uuid": "u"},
    ]
    assert messages_of([{"role": "user", "content": parts}])[0]["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        {"type": "image_url", "image_url": {"url": "file-1"}, "uuid": "u"},
    ]


def test_custom_calls_are_calls_with_one_string() -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": 'a"b'}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    reported = messages_of([USER, call, output], tools=[{"type": "custom", "name": "g"}])
    assert reported[1]["tool_calls"][0]["function"] == {
        "name": "g",
        "arguments": '{"input":"a\\"b"}',
    }
    assert reported[2]["content"] == "done"


def test_mcp_calls_become_calls_with_results() -> None:
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "docs", "name": "find"}
    done = {**call, "arguments": "{}", "output": "42"}
    failed = {**call, "id": "mcp_2", "arguments": "{}", "error": {"message": "no"}}
    listing = {"type": "mcp_list_tools", "id": "l", "server_label": "docs", "tools": []}
    body = read(input=[USER, listing, done, failed], tools=[SERVER])
    reported: Any = translate(body, served={"tools[0]": [FIND]}).chat.messages
    assert [each["role"] for each in reported] == ["user", "assistant", "tool", "assistant", "tool"]
    assert reported[1]["tool_calls"][0]["function"]["name"] == "docs_find"
    assert reported[2]["content"] == "42"
    assert "no" in reported[4]["content"]


def test_a_forced_mcp_call_is_forced_once() -> None:
    call = {"type": "mcp_call", "id": "m", "server_label": "docs", "name": "find"}
    done = {**call, "arguments": "{}", "output": "42"}
    for items, expected in [([USER], "required"), ([USER, done], "auto")]:
        body = read(input=items, tools=[SERVER], tool_choice="required")
        assert translate(body, served={"tools[0]": [FIND]}).chat.tool_choice == expected


def test_previous_items_come_between_instructions_and_input() -> None:
    body = read(instructions="Be kind", previous_response_id="resp_1")
    reported = translate(body, [USER, {"role": "assistant", "content": "Hello"}]).chat.messages
    assert [each["role"] for each in reported] == ["system", "user", "assistant", "user"]


def chat_of(**fields: Any) -> dict[str, Any]:
    chat = translate(read(**fields)).chat.model_dump(exclude_unset=True, by_alias=True)
    return {name: value for name, value in chat.items() if name != "messages"}


def test_fields_with_other_names() -> None:
    schema = {"type": "object"}
    shape = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert chat_of(
        max_output_tokens=5,
        reasoning={"effort": "low"},
        truncation="auto",
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        text={"format": shape},
    ) == {
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
        "truncate_prompt_tokens": -1,
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "strict": True},
        },
    }
    assert chat_of(text={"format": {"type": "json_object"}}) == {
        "response_format": {"type": "json_object"}
    }
    assert (
        chat_of(text={"format": {"type": "text"}, "verbosity": "medium"}, metadata={"a": "b"}) == {}
    )


def test_fields_with_the_same_name_are_passed_on() -> None:
    same = {"temperature": 0.5, "top_p": 0.5, "seed": 1, "stop": ["x"], "user": "u", "priority": 1}
    assert chat_of(**same) == same


def function_of(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("none", "none", ["f", "g", "docs_find"]),
        ("required", "required", ["f", "g", "docs_find"]),
        ({"type": "function", "name": "f"}, function_of("f"), ["f", "g", "docs_find"]),
        ({"type": "custom", "name": "g"}, function_of("g"), ["f", "g", "docs_find"]),
        (
            {"type": "mcp", "server_label": "docs"},
            function_of("docs_find"),
            ["f", "g", "docs_find"],
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "auto",
            ["f"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "g"}, {"type": "mcp", "server_label": "docs"}],
            },
            "required",
            ["g", "docs_find"],
        ),
    ],
)
def test_tool_choice(choice: Any, expected: Any, names: list[str]) -> None:
    tools = [FUNCTION, {"type": "custom", "name": "g"}, SERVER]
    chat = translate(read(tools=tools, tool_choice=choice), served={"tools[2]": [FIND]}).chat
    assert chat.tool_choice == expected
    assert [each["function"]["name"] for each in chat.tools or ()] == names


def test_a_tool_choice_without_tools_is_harmless() -> None:
    assert chat_of(tools=[], tool_choice="auto") == {}


def image(**fields: Any) -> Any:
    return [{"role": "user", "content": [{"type": "input_image", **fields}]}]


def part(**fields: Any) -> Any:
    return [USER, {"role": "user", "content": [{"type": "input_text", "text": "a"}, fields]}]


BAD_INPUT: list[tuple[Any, str]] = [
    ([], "input"),
    (5, "input"),
    (None, "input"),
    (["text"], "input[0]"),
    ([{}], "input[0].type"),
    ([{"type": "nonsense"}], "input[0].type"),
    ([{"type": "file_search_call", "id": "x"}], "input[0].type"),
    ([{"type": 7}], "input[0].type"),
    ([{"role": "tool", "content": "x"}], "input[0].role"),
    ([{"type": "message", "content": "x"}], "input[0].role"),
    ([{"role": ["user"], "content": "x"}], "input[0].role"),
    ([{"role": "user"}], "input[0].content"),
    ([{"role": "user", "content": 7}], "input[0].content"),
    ([{"role": "assistant", "content": 7}], "input[0].content"),
    ([{"role": "user", "content": ["a"]}], "input[0].content[0]"),
    (part(type="nonsense"), "input[1].content[1].type"),
    (part(text="x"), "input[1].content[1].type"),
    (part(type="input_text"), "input[1].content[1].text"),
    (part(type="input_text", text=5), "input[1].content[1].text"),
    (part(type="input_file", file_id="f"), "input[1].content[1].type"),
    ([{"role": "assistant", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
    (image(), "input[0].content[0].image_url"),
    (image(image_url=5), "input[0].content[0].image_url"),
    (image(image_url={"url": "x"}), "input[0].content[0].image_url"),
    (image(file_id=5), "input[0].content[0].file_id"),
    (image(image_url="x", detail="big"), "input[0].content[0].detail"),
    ([{**CALL, "call_id": None}], "input[0].call_id"),
    ([{**CALL, "name": ""}], "input[0].name"),
    ([{**CALL, "arguments": {}}], "input[0].arguments"),
    ([CALL, CALL], "input[1].call_id"),
    ([OUTPUT], "input[0].call_id"),
    ([CALL, {**OUTPUT, "output": None}], "input[1].output"),
    ([CALL, {**OUTPUT, "output": [{"type": "x"}]}], "input[1].output[0].type"),
    ([{"type": "reasoning", "content": "a", "summary": 5}, USER], "ok"),
    ([{"type": "reasoning", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
    ([{"type": "reasoning", "summary": 5}], "input[0].summary"),
    ([{"type": "item_reference", "id": "msg_1"}], "input[0].id"),
    ([{"type": "item_reference"}], "input[0].id"),
    ([{"type": "custom_tool_call", "call_id": "c", "name": "g"}], "input[0].input"),
    ([{"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}"}], "input[0].server_label"),
]


def refusal(**fields: Any) -> TokenMeshError | None:
    try:
        translate(read(**fields))
    except InvalidInput as error:
        return error
    return None


@pytest.mark.parametrize(("items", "param"), BAD_INPUT)
def test_bad_input_is_refused_by_its_path(items: Any, param: str) -> None:
    error = refusal(input=items)
    if param == "ok":
        assert error is None
        return
    assert error is not None
    assert error.param == param
    assert param in error.message


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"background": "maybe"}, "background"),
    ({"conversation": 5}, "conversation"),
    ({"include": ["nonsense"]}, "include[0]"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"instructions": 5}, "instructions"),
    ({"instructions": [USER]}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "five"}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ({"metadata": {f"k{index}": "" for index in range(17)}}, "metadata"),
    ({"parallel_tool_calls": "never"}, "parallel_tool_calls"),
    ({"previous_input_messages": [{}]}, "previous_input_messages"),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": True}}, "reasoning.summary"),
    ({"reasoning": "low"}, "reasoning"),
    ({"safety_identifier": 5}, "safety_identifier"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"store": "never"}, "store"),
    ({"stream": "never"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {}}}, "text.format.type"),
    ({"text": {"format": {"type": "text", "nonsense": 1}}}, "text.format.nonsense"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [FUNCTION]}, "tool_choice"),
    ({"tool_choice": {"type": "custom", "name": "f"}, "tools": [FUNCTION]}, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.server_label"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "x"}]}},
        "tool_choice.tools[0].type",
    ),
    ({"tools": {}}, "tools"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
    ({"tools": [FUNCTION, SERVER]}, "tools[1].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{**FUNCTION, "parameters": "x"}]}, "tools[0].parameters"),
    ({"tools": [{**FUNCTION, "strict": "x"}]}, "tools[0].strict"),
    ({"tools": [{**FUNCTION, "description": 5}]}, "tools[0].description"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
    (
        {"tools": [{"type": "custom", "name": "g", "format": {"type": "grammar"}}]},
        "tools[0].format",
    ),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"truncation": "some"}, "truncation"),
    ({"user": 5}, "user"),
    ({"enable_response_messages": "x"}, "enable_response_messages"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 0.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"structured_outputs": 5}, "structured_outputs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"media_io_kwargs": 5}, "media_io_kwargs"),
    ({"mm_processor_kwargs": 5}, "mm_processor_kwargs"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 0.5}, "priority"),
    ({"request_id": ""}, "request_id"),
    ({"session_id": 5}, "session_id"),
    ({"mm_payload": 5}, "mm_payload"),
    ({"return_mm_kwargs": 5}, "return_mm_kwargs"),
    ({"vllm_xargs": 5}, "vllm_xargs"),
    ({"kv_transfer_params": 5}, "kv_transfer_params"),
    ({"ec_transfer_params": 5}, "ec_transfer_params"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error is not None
    assert error.param is not None
    assert error.param.startswith(param)
    assert param in error.message


def test_every_field_has_a_bad_value_here() -> None:
    tried = {name for fields, _ in BAD_FIELDS for name in fields} | {"input"}
    # watermarking accepts any value: the chat refuses it.
    assert set(ResponsesRequest.model_fields) - tried == {"watermarking"}


def renamed(path: FieldPath, translation: ResponsesTranslation) -> InvalidInput:
    message = f"{field_name(path)} is odd"
    error = translation.fields.rename(InvalidInput(message, param=str(path[0]), path=path))
    assert isinstance(error, InvalidInput)
    return error


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("messages", 2, "content", 1), "input[2].content[1]"),
        (("messages", 3, "tool_calls", 0, "function", "arguments"), "input[3].arguments"),
        (("messages", 4, "content"), "input[4].output"),
        (("tools", 0, "function", "parameters"), "tools[0].parameters"),
        (("response_format", "json_schema", "schema", "type"), "text.format.schema.type"),
        (("max_tokens",), "max_output_tokens"),
        (("messages",), "input"),
    ],
)
def test_errors_of_the_chat_name_the_clients_fields(path: FieldPath, expected: str) -> None:
    items = [{"role": "developer", "content": "x"}, *part(type="input_image", image_url="u")]
    body = read(input=[*items, CALL, OUTPUT], instructions="Be", tools=[FUNCTION])
    error = renamed(path, translate(body))
    assert (error.param, error.message) == (expected, f"{expected} is odd")


def test_errors_of_the_clients_own_fields_are_unchanged() -> None:
    translation = translate(read())
    for error in (InvalidInput("away"), InvalidInput("temperature is odd", param="temperature")):
        assert translation.fields.rename(error) is error


def test_fields_without_effect_are_warnings() -> None:
    requested: Any = {
        "include": ["reasoning.encrypted_content"],
        "top_logprobs": 2,
        "reasoning": {"summary": "auto", "depth": 1},
        "nonsense": 1,
    }
    reported = " ".join(translate(read(**requested)).warnings)
    for each in ("encrypted_content", "top_logprobs", "summary", "nonsense", "reasoning.depth"):
        assert each in reported
    assert translate(read(metadata={"a": "b"}, text={"format": {"type": "text"}})).warnings == []


@pytest.mark.parametrize(
    "piece",
    [
        {"type": "message", "role": "system", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
    ],
)
def test_parts_of_one_message_are_joined_once(piece: dict[str, Any]) -> None:
    """Adding a part must not copy the earlier ones."""
    long = json.loads(json.dumps(piece).replace('"a"', json.dumps("x" * 2_000_000)))

    def best_s(first: dict[str, Any]) -> float:
        return min(_time_s([first] + [piece] * 1000) for _ in range(3))

    assert best_s(long) < 4 * best_s(piece) + 0.02


def _time_s(items: list[Any]) -> float:
    began_s = time.process_time()
    messages_of(items)
    return time.process_time() - began_s
