"""Bodies and events that no decent client sends: refused with the name of a field, or served."""

import asyncio
import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tokenmesh.services.gateway.apis.anthropic.request import MessagesRequest
from tokenmesh.services.gateway.apis.anthropic.translation import translate
from tokenmesh.services.gateway.apis.realtime.conversation import read_item
from tokenmesh.services.gateway.apis.realtime.events import decode_event, read_event
from tokenmesh.services.gateway.core.http.errors import invalid_fields
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput

LIMITS = GatewaySettings()

VALID: Any = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "t"},
                {"type": "image", "source": {"type": "url", "url": "https://x/y"}},
                {"type": "document", "source": {"type": "text", "data": "d"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "tool_use", "id": "i", "name": "f", "input": {"a": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "i",
                    "content": [{"type": "text", "text": "r"}],
                }
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {}}}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "thread": {"type": "create"},
}
EVENTS: Any = [
    {
        "type": "session.update",
        "session": {
            "type": "realtime",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "tool_choice": {"type": "function", "name": "f"},
            "output_modalities": ["text"],
            "max_output_tokens": "inf",
            "reasoning": {"effort": "low"},
        },
    },
    {"type": "response.create", "response": {"input": [{"type": "item_reference", "id": "i"}]}},
    {"type": "conversation.item.truncate", "item_id": "i", "content_index": 0, "audio_end_ms": 0},
]
ITEMS: Any = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "u"}]},
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
]
WORDS = st.sampled_from(
    ["", "text", "tool_use", "image", "any", "url", "enabled", "user", "message", "f", "x" * 300]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    WORDS,
    st.lists(st.one_of(WORDS, st.none(), st.dictionaries(WORDS, WORDS, max_size=1)), max_size=2),
    st.dictionaries(WORDS, st.one_of(WORDS, st.integers(), st.none()), max_size=2),
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in a value."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    found = [(value, key) for key in keys]
    for key in keys:
        found += _places(value[key])
    return found


def _broken(valid: Any, data: st.DataObject) -> Any:
    """A copy with some places changed, removed or doubled."""
    body = [copy.deepcopy(valid)]
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(_places(body)))
        change = data.draw(st.sampled_from(["set", "remove", "add"]))
        if change == "add" and isinstance(holder, dict):
            holder[data.draw(WORDS)] = data.draw(VALUES)
        elif change == "remove" and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = data.draw(VALUES)
    return body[0]


@settings(max_examples=200)
@given(st.data())
def test_a_broken_message_names_a_field_or_is_served(data: st.DataObject) -> None:
    text = json.dumps(_broken(VALID, data))
    try:
        body = MessagesRequest.model_validate_json(text)
    except ValidationError as error:
        _check(invalid_fields(error))
        return
    try:
        chat = translate(body).chat
    except InvalidInput as error:
        _check(error)
    else:
        assert chat.messages


@settings(max_examples=150)
@given(st.data())
def test_a_broken_event_names_a_field_or_is_read(data: st.DataObject) -> None:
    text = json.dumps(_broken(data.draw(st.sampled_from(EVENTS)), data))
    try:
        read_event(asyncio.run(decode_event(text, LIMITS)))
    except InvalidInput as error:
        _check(error)


@settings(max_examples=100)
@given(st.data())
def test_a_broken_item_names_a_field_or_is_read(data: st.DataObject) -> None:
    value = _broken(data.draw(st.sampled_from(ITEMS)), data)
    if not isinstance(value, dict):
        return
    try:
        item = read_item(value, "item")
    except InvalidInput as error:
        _check(error)
    else:
        assert item.view["status"] == "completed"


@given(st.text(), st.binary())
def test_any_text_is_an_event_or_refused(text: str, data: bytes) -> None:
    for each in (text, data.decode("utf-8", "replace")):
        try:
            read_event(asyncio.run(decode_event(each, LIMITS)))
        except InvalidInput as error:
            _check(error)


def _check(error: InvalidInput) -> None:
    assert 400 <= error.status < 500
    assert error.message
    if error.param is not None:
        assert error.param in error.message or error.param.partition("[")[0] in error.message
