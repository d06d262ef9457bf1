"""Fields as generated clients send them: null for everything unset, whole numbers with a point."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tokenmesh.services.gateway.apis.anthropic.request import MessagesRequest
from tokenmesh.services.gateway.apis.openai.batch_chat import BatchChatRequest
from tokenmesh.services.gateway.apis.openai.request import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.core.http.fields import Conversions

CHAT = [{"role": "user", "content": "Hi"}]
BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": CHAT}),
    (BatchChatRequest, {"messages": [CHAT]}),
    (CompletionRequest, {"prompt": "Hi"}),
    (ResponsesRequest, {"input": "Hi"}),
    (MessagesRequest, {"model": "m", "max_tokens": 3, "messages": CHAT}),
    (TokenizeRequest, {"prompt": "Hi"}),
]
NAMES = [model.__name__ for model, _ in BODIES]


def read(model: type[BaseModel], body: dict[str, Any]) -> BaseModel:
    return model.model_validate_json(json.dumps(body))


@pytest.mark.parametrize(("model", "body"), BODIES, ids=NAMES)
def test_null_is_the_default_of_every_field(model: type[BaseModel], body: dict[str, Any]) -> None:
    plain = read(model, body)
    for name in model.model_fields.keys() - body.keys():
        given = getattr(read(model, {**body, name: None}), name)
        default = getattr(plain, name)
        # None where that is said of the field itself, as of max_tokens: the model's default
        assert given is None or (given == default and type(given) is type(default)), name


@pytest.mark.parametrize(("model", "body"), BODIES, ids=NAMES)
def test_the_document_says_which_fields_may_be_null(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    for name, schema in model.model_json_schema()["properties"].items():
        if name not in body:
            kinds = [each.get("type") for each in schema.get("anyOf", [schema])]
            assert "null" in kinds or kinds == [None], name


@pytest.mark.parametrize(
    ("model", "body", "name"),
    [
        (ChatRequest, {"messages": CHAT}, "max_tokens"),
        (ChatRequest, {"messages": CHAT}, "max_completion_tokens"),
        (ChatRequest, {"messages": CHAT}, "n"),
        (ChatRequest, {"messages": CHAT}, "top_k"),
        (ChatRequest, {"messages": CHAT}, "seed"),
        (ChatRequest, {"messages": CHAT}, "min_tokens"),
        (ChatRequest, {"messages": CHAT}, "top_logprobs"),
        (CompletionRequest, {"prompt": "Hi"}, "max_tokens"),
        (CompletionRequest, {"prompt": "Hi"}, "logprobs"),
        (ResponsesRequest, {"input": "Hi"}, "max_output_tokens"),
        (MessagesRequest, {"model": "m", "messages": CHAT}, "max_tokens"),
    ],
)
def test_a_whole_number_may_be_written_with_a_point(
    model: type[BaseModel], body: dict[str, Any], name: str
) -> None:
    value = getattr(model.model_validate_json(json.dumps({**body, name: 8.0})), name)
    assert (value, type(value)) == (8, int)
    for text in ("8", "+8", "8.0", " 8 "):
        value = getattr(model.model_validate_json(json.dumps({**body, name: text})), name)
        assert (value, type(value)) == (8, int)
    for wrong in ("8.5", '"8.5"', '"8_0"', '"\u0668"', '""', '"x"', "true", "1e300", "1e999"):
        text = json.dumps(body)[:-1] + f', "{name}": {wrong}}}'
        with pytest.raises(ValidationError) as error:
            model.model_validate_json(text)
        assert error.value.errors()[0]["loc"] == (name,), wrong


@pytest.mark.parametrize(
    ("fields", "read_as"),
    [
        ({"temperature": "0.5"}, {"temperature": 0.5}),
        ({"top_p": " .5 ", "min_p": "5e-1"}, {"top_p": 0.5, "min_p": 0.5}),
        ({"logprobs": "true", "stream": "False"}, {"logprobs": True, "stream": False}),
        ({"ignore_eos": "1", "include_reasoning": "off"}, {"ignore_eos": True}),
        ({"temperature": 0.5, "logprobs": True, "n": 1}, {}),
    ],
)
def test_a_number_or_a_boolean_in_a_string_is_converted_and_recorded(
    fields: dict[str, Any], read_as: dict[str, Any]
) -> None:
    names = Conversions()
    text = json.dumps({"messages": CHAT, **fields})
    body = ChatRequest.model_validate_json(text, context=names)
    for name, value in read_as.items():
        assert (getattr(body, name), type(getattr(body, name))) == (value, type(value))
    assert list(names) == [name for name in ChatRequest.model_fields if name in names]
    assert set(names) == {name for name, value in fields.items() if isinstance(value, str)}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("temperature", "1_0"),
        ("temperature", "101"),
        ("temperature", "1" * 100_000),
        ("n", "1" * 100_000),
        ("logprobs", "maybe"),
        ("logprobs", 2),
        ("stop_token_ids", ["1"]),
    ],
)
def test_other_strings_are_neither_numbers_nor_booleans(name: str, wrong: object) -> None:
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate_json(json.dumps({"messages": CHAT, name: wrong}))
    assert error.value.errors()[0]["loc"][0] == name


def test_the_bounds_of_numbers_are_in_the_document() -> None:
    properties = ChatRequest.model_json_schema()["properties"]
    assert properties["max_tokens"]["anyOf"][0]["minimum"] == 1
    assert properties["min_tokens"]["anyOf"][0] == {
        "maximum": 2**31 - 1,
        "minimum": 0,
        "type": "integer",
    }
    assert properties["length_penalty"]["anyOf"][0]["maximum"] == 10
    assert properties["temperature"]["anyOf"][0]["maximum"] == 100
