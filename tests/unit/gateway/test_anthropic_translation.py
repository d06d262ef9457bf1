"""Requests of the Messages API as chats, and errors with the client's paths."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tokenmesh.services.gateway.apis.anthropic.request import CountTokensRequest, MessagesRequest
from tokenmesh.services.gateway.apis.anthropic.translation import translate
from tokenmesh.services.gateway.apis.openai.request import ChatRequest
from tokenmesh.services.gateway.apis.openai.translation import TranslatedChat
from tokenmesh.services.gateway.core.http.errors import invalid_fields
from tokenmesh.shared.errors import FieldPath, InvalidInput, Overloaded, field_name

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "Hi"}
CALL: Json = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "caf\u00e9"}}
TOOL: Json = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
FUNCTION: Json = {"type": "function", "function": {"name": "look"}}
PIXEL: Json = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def read(**fields: Any) -> TranslatedChat:
    """Translates as the route does."""
    body = {"model": "m", "max_tokens": 100, "messages": [USER]} | fields
    try:
        parsed = MessagesRequest.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise invalid_fields(error) from None
    return translate(parsed)


def chat(**fields: Any) -> ChatRequest:
    return read(**fields).chat


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def result(**fields: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": "toolu_1"} | fields


def test_a_minimal_request() -> None:
    body = chat()
    assert body.model_fields_set == {"model", "messages", "max_tokens"}
    assert body.messages == [USER]


@pytest.mark.parametrize(
    ("system", "reported"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief."), text("Be kind.")], "Be brief.\nBe kind."),
        ([text("x-anthropic-billing-header: cc_version=1"), text("Be brief.")], "Be brief."),
    ],
)
def test_the_system_prompt_comes_first(system: Any, reported: str) -> None:
    assert chat(system=system).messages == [{"role": "system", "content": reported}, USER]


def test_an_empty_system_prompt_is_none() -> None:
    assert chat(system="").messages == chat(system=[]).messages == [USER]


def test_a_round_of_tools() -> None:
    turns = [
        USER,
        assistant(
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "zzz"},
            text("Let me see."),
            CALL,
        ),
        user(result(content="sunny"), text("And now?")),
    ]
    assert chat(messages=turns, tools=[TOOL]).messages == [
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "Hm.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": "caf\u00e9"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "look", "content": "sunny"},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({}, ""),
        ({"content": "no"}, "no"),
        ({"content": [text("a"), text("b")]}, "a\nb"),
        ({"content": "no", "is_error": True}, "Error: no"),
        ({"content": "no", "is_error": False}, "no"),
    ],
)
def test_results_of_tools(fields: Json, reported: str) -> None:
    messages = chat(messages=[USER, assistant(CALL), user(result(**fields))]).messages
    assert messages[-1]["content"] == reported


def test_images_of_a_result_move_to_the_users_next_message() -> None:
    shown = result(content=[text("a map"), {"type": "image", "source": PIXEL}])
    messages = chat(messages=[USER, assistant(CALL), user(shown, text("Where?"))]).messages
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "user"]
    assert messages[-2]["content"] == "a map"
    assert messages[-1]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        text("Where?"),
    ]


@pytest.mark.parametrize(
    ("source", "url"),
    [
        (PIXEL, "data:image/png;base64,aGk="),
        ({"type": "url", "url": "https://x/y.png"}, "https://x/y.png"),
        ({"type": "file", "file_id": "file-1"}, "file-1"),
    ],
)
def test_images(source: Json, url: str) -> None:
    (message,) = chat(messages=[user({"type": "image", "source": source})]).messages
    assert message["content"] == [{"type": "image_url", "image_url": {"url": url}}]


def test_documents_and_search_results_are_text() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}}
    found = {"type": "search_result", "title": "S", "source": "u", "content": [text("hit")]}
    (message,) = chat(messages=[user(document, found)]).messages
    assert message["content"] == [text("T\nbody"), text("S\nu\nhit")]


def test_a_begun_answer_is_continued() -> None:
    body = chat(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert (body.add_generation_prompt, body.continue_final_message) == (False, True)
    assert not body.echo


@pytest.mark.parametrize(
    ("choice", "reported", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "none"}, "none", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        (
            {"type": "tool", "name": "look"},
            {"type": "function", "function": {"name": "look"}},
            True,
        ),
    ],
)
def test_the_choice_of_tools(choice: Json, reported: Any, parallel: bool) -> None:
    body = chat(tools=[TOOL | {"type": "custom", "cache_control": {}}], tool_choice=choice)
    assert (body.tool_choice, body.parallel_tool_calls) == (reported, parallel)
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert body.tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("thinking", "switch", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 40}, True, 40),
        ({"type": "disabled"}, False, None),
        ({"type": "adaptive"}, True, None),
    ],
)
def test_thinking(thinking: Json, switch: bool, budget: int | None) -> None:
    body = chat(thinking=thinking)
    assert body.chat_template_kwargs == {"enable_thinking": switch, "thinking": switch}
    assert body.thinking_token_budget == budget


def test_the_clients_template_arguments_have_priority() -> None:
    body = chat(thinking={"type": "disabled"}, chat_template_kwargs={"thinking": True, "x": 1})
    assert body.chat_template_kwargs == {"enable_thinking": False, "thinking": True, "x": 1}


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_structured_output(name: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    given = {"format": wanted, "effort": "low"} if name == "output_config" else wanted
    body = chat(**{name: given})
    assert body.response_format is not None
    assert body.response_format.model_dump(by_alias=True, exclude_none=True) == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }
    assert body.reasoning_effort == ("low" if name == "output_config" else None)


def test_counting_needs_no_max_tokens() -> None:
    body = CountTokensRequest.model_validate({"model": "m", "messages": [USER], "tools": [TOOL]})
    assert translate(body).chat.tools is not None


def test_fields_that_only_chats_have_are_ignored() -> None:
    assert chat(n=3, logprobs=True).model_fields_set == {"model", "messages", "max_tokens"}


BLOCK = "messages[0].content[0]"
WRONG: list[tuple[Json, str]] = [
    ({"model": None}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [user()]}, "messages[0].content"),
    ({"messages": [USER, assistant(CALL)]}, "messages[1]"),
    ({"messages": [{"role": "system", "content": ""}]}, "messages[0]"),
    ({"messages": [user({"text": "a"})]}, f"{BLOCK}.type"),
    ({"messages": [user({"type": "hologram"})]}, f"{BLOCK}.type"),
    ({"messages": [user(CALL)]}, f"{BLOCK}.type"),
    ({"messages": [user({"type": "server_tool_use"})]}, f"{BLOCK}.type"),
    ({"messages": [user({"type": "text"})]}, f"{BLOCK}.text"),
    ({"messages": [user({"type": "text", "text": 1})]}, f"{BLOCK}.text"),
    ({"messages": [user(result())]}, f"{BLOCK}.tool_use_id"),
    ({"messages": [user({"type": "image"})]}, f"{BLOCK}.source"),
    ({"messages": [user({"type": "image", "source": {"type": "x"}})]}, f"{BLOCK}.source.type"),
    ({"messages": [user({"type": "image", "source": {"type": "url"}})]}, f"{BLOCK}.source.url"),
    (
        {"messages": [user({"type": "image", "source": {"type": "base64", "data": "aGk="}})]},
        f"{BLOCK}.source.media_type",
    ),
    (
        {"messages": [user({"type": "document", "source": {"type": "base64"}})]},
        f"{BLOCK}.source.type",
    ),
    (
        {
            "messages": [
                USER,
                assistant({"type": "tool_use", "id": "a", "name": "b", "input": 1}),
            ]
        },
        "messages[1].content[0].input",
    ),
    (
        {"messages": [USER, assistant(CALL), user(result(content=[CALL]))]},
        "messages[2].content[0].content[0].type",
    ),
    ({"system": 1}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tools": [TOOL, {"input_schema": {"type": "object"}}]}, "tools[1].name"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "disabled", "display": "all"}}, "thinking.display"),
    ({"output_config": {"effort": "much"}}, "output_config.effort"),
    (
        {"output_config": {"format": {"type": "xml", "schema": {}}}},
        "output_config.format.type",
    ),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"metadata": {"user_id": 1}}, "metadata.user_id"),
    ({"stop_sequences": "END"}, "stop_sequences"),
    ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ({"stream": "maybe"}, "stream"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_p": 0}, "top_p"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_errors_name_the_field(fields: Json, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("path", "param", "renamed", "renamed_param"),
    [
        (("messages", 0), "messages", "system", "system"),
        (("messages", 1, "content", 1), None, "messages[0].content[1]", None),
        (("messages", 3, "content"), None, "messages[2].content[0].content", None),
        (("stop", 0), "stop", "stop_sequences[0]", "stop_sequences[0]"),
        (("messages", 77), None, "messages[77]", None),
    ],
)
def test_errors_of_other_services_name_the_clients_fields(
    path: FieldPath, param: str | None, renamed: str, renamed_param: str | None
) -> None:
    turns = [user(text("a"), text("b")), assistant(CALL), user(result())]
    fields = read(system="s", messages=turns).fields
    error = fields.rename(InvalidInput(f"{field_name(path)} is odd", param=param, path=path))
    assert (error.message, error.param) == (f"{renamed} is odd", renamed_param)


def test_a_field_is_renamed_as_a_whole_word() -> None:
    error = InvalidInput("stop needs no stop_token_ids", param="stop")
    renamed = read().fields.rename(error)
    assert renamed.message == "stop_sequences needs no stop_token_ids"


def test_server_errors_are_unchanged() -> None:
    error = Overloaded("messages[0]", retry_after_s=1)
    assert read().fields.rename(error) is error


@pytest.mark.parametrize(
    ("chat_field", "field"), [("name", "name"), ("parameters", "input_schema")]
)
def test_errors_of_a_tool_name_the_clients_fields(chat_field: str, field: str) -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("a", "b")]
    path = ("tools", 1, "function", chat_field)
    wrong = InvalidInput(f"{field_name(path)} is wrong", param="tools", path=path)
    error = read(tools=tools).fields.rename(wrong)
    assert (error.message, error.param) == (f"tools[1].{field} is wrong", f"tools[1].{field}")


def test_only_this_api_lets_system_messages_join_the_first() -> None:
    assert chat(messages=[USER, {"role": "system", "content": "Reminder"}]).merges_system
    body = {"messages": [USER], "merges_system": True, "_merges_system": True}
    assert not ChatRequest.model_validate(body).merges_system
