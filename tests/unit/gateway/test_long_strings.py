"""Long strings of a large body are decoded in portions; its fields are validated as objects."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import from_json

# Its imports define the models.
import tokenmesh.services.gateway.app  # noqa: F401
from tests.unit.gateway.test_body import parsed
from tokenmesh.services.gateway.apis.openai.request import ChatRequest, CompletionRequest
from tokenmesh.services.gateway.core.http import body as body_module
from tokenmesh.services.gateway.core.http import long_strings
from tokenmesh.services.gateway.core.http.errors import invalid_fields
from tokenmesh.services.gateway.core.http.fields import Bounded, Conversions
from tokenmesh.shared.errors import InvalidInput


def models(base: type[Bounded]) -> Iterator[type[Bounded]]:
    """In an order that does not depend on that of imports; those of tests are left out."""
    for each in sorted(base.__subclasses__(), key=lambda each: (each.__name__, each.__module__)):
        if each.__module__.startswith("tests."):
            continue
        yield each
        yield from models(each)


CHARACTERS = [
    "a",
    "\\n",
    '\\"',
    "\\\\",
    "\\u00e9",
    "\\ud83d\\ude00",
    "é",
    "€",
    "😀",
    "\\\\\\ud83d\\ude00\\\\",
]


@pytest.mark.parametrize("piece", [*CHARACTERS, "".join(CHARACTERS)])
@pytest.mark.parametrize("shift", range(13))
async def test_a_long_string_read_in_portions_is_equal(piece: str, shift: int) -> None:
    text = "x" * shift + piece * (160_000 // len(piece.encode()))
    data = f'{{"prompt": ["{text}", "b"], "user": "{text}"}}'.encode()
    expected = json.loads(data)
    body = await parsed(CompletionRequest, data)
    assert body.prompt == expected["prompt"]
    assert body.user == expected["user"]


async def test_a_long_string_is_never_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def decoded(data: bytes) -> Any:
        sizes.append(len(data))
        return from_json(data)

    monkeypatch.setattr(body_module, "from_json", decoded)
    monkeypatch.setattr(long_strings, "from_json", decoded)
    text = "a\n" * 2_000_000
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "b"}]
    data = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    assert (await parsed(ChatRequest, data)).messages[0]["content"] == parts
    assert sum(sizes) > 6_000_000
    assert max(sizes) < 128 * 1024


LONG = b"x" * 200_000


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"prompt": "%s' % LONG, "EOF while parsing a string"),
        (b'{"prompt": "%s\\"' % LONG, "EOF while parsing a string"),
        (b'{"prompt": "%s\\x%s"}' % (LONG, LONG), "invalid escape"),
        (b'{"prompt": "%s\\ud800%s"}' % (LONG, LONG), "hex escape"),
        (b'{"prompt": "%s\x00%s"}' % (LONG, LONG), "control character"),
        (b'{"prompt": "%s%s"}' % (LONG, b"\x80" * 200_000), "invalid unicode"),
        (b'{"prompt": "%s",}' % LONG, "trailing comma"),
        (b'{"prompt" "%s"}' % LONG, "expected `:`"),
        (b'{"%s": 1}' % LONG, "a field's name is longer"),
        (b'{"prompt": "a", "stop": {"%s": 1}}' % LONG, "a field's name is longer"),
        (b'{"prompt": 1, "user": "%s"}' % LONG, "prompt: Input should be"),
    ],
)
async def test_a_broken_body_with_a_long_string_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        await parsed(CompletionRequest, data)
    assert "line 1" not in str(caught.value)


VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 8.0, 10**30, float("nan"), "x", "5", "true", "1.5", "auto"),
    *([], [1], ["a"], [{}], [[1], [2]], {}, {"a": 1}, {"1": 2.0}, {"type": "text"}),
    *({"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}, {"choice": ["a"]}),
    [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    [{"role": "user", "content": "x"}],
]


def _outcome(validate: Callable[..., object]) -> tuple[str, object, Conversions]:
    converted = Conversions()
    try:
        return "valid", validate(context=converted), converted
    except ValidationError as error:
        return "invalid", invalid_fields(error).message, converted


@pytest.mark.parametrize("model", [each for each in models(Bounded) if each.model_fields])
def test_large_bodies_are_validated_as_small_ones(model: type[Bounded]) -> None:
    """Large ones as objects, in steps; small ones from their JSON."""
    others: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    required = {
        name: others.get(name, "x")
        for name, field in model.model_fields.items()
        if field.is_required()
    }
    for name in model.model_fields:
        for value in VALUES:
            data = json.dumps({**required, name: value}).encode()
            small = partial(model.model_validate_json, data)
            large = partial(model.model_validate, from_json(data))
            found = [_outcome(validate) for validate in (small, large)]
            assert repr(found[0]) == repr(found[1])
