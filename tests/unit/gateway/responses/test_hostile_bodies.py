"""Any JSON body is translated into a chat or refused with a path."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.translation import translate
from tokenmesh.services.gateway.core.http.errors import invalid_fields
from tokenmesh.shared.errors import InvalidInput

WORDS = [
    *("message", "reasoning", "function_call", "custom_tool_call", "function_call_output"),
    *("mcp_call", "mcp_list_tools", "item_reference", "mcp_approval_request", "nonsense"),
    *("input_text", "output_text", "input_image", "refusal", "summary_text", "reasoning_text"),
    *("function", "custom", "mcp", "allowed_tools", "auto", "required", "none", "web_search"),
    "namespace",
    *("user", "assistant", "system", "developer", "tool", "json_schema", "json_object", "text"),
]
KEYS = [
    *("type", "role", "content", "text", "call_id", "id", "name", "arguments", "output", "input"),
    *("summary", "image_url", "file_id", "uuid", "detail", "server_label", "refusal", "error"),
    *("parameters", "strict", "description", "format", "tools", "mode", "schema", "namespace"),
]
LEAVES = st.one_of(
    st.sampled_from(WORDS), st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text()
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=6,
)
OBJECT = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6)
BODIES = st.fixed_dictionaries(
    {"input": st.one_of(st.lists(OBJECT, max_size=5), st.text(), JSON)},
    optional={
        "tools": st.lists(OBJECT, max_size=3) | JSON,
        "tool_choice": OBJECT | JSON,
        "text": st.fixed_dictionaries({"format": OBJECT | JSON}) | JSON,
        "reasoning": JSON,
        "include": JSON,
        "metadata": JSON,
        "stream_options": JSON,
        "instructions": JSON,
    },
)


@settings(max_examples=200)
@given(BODIES)
def test_any_body_is_translated_or_refused_by_a_path(body: dict[str, Any]) -> None:
    refused: InvalidInput | None = None
    try:
        chat = translate(ResponsesRequest.model_validate_json(msgspec.json.encode(body))).chat
    except ValidationError as error:
        refused = invalid_fields(error)
    except InvalidInput as error:
        refused = error
    else:
        msgspec.json.encode(chat.model_dump())
    assert refused is None or refused.param


@pytest.mark.parametrize("kind", [[], {}, ["input_text"], 0, True])
def test_a_type_that_is_not_a_string_is_refused(kind: Any) -> None:
    body = {"input": [{"role": "user", "content": [{"type": kind, "text": "a"}]}]}
    with pytest.raises(InvalidInput, match="type"):
        translate(ResponsesRequest.model_validate(body))
