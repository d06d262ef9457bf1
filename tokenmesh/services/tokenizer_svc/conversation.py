"""Messages as templates want them: content as string or parts, tool arguments as objects.

Follows vLLM for content parts and image placeholders, and transformers for nulls and reasoning.
"""

import json
from typing import Final

from tokenmesh.services.tokenizer_svc.render_job import JsonObject, RenderJob
from tokenmesh.services.tokenizer_svc.template_shape import TemplateShape
from tokenmesh.shared.errors import FieldPath, field_name

_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")


class UnusableMessages(Exception):
    """The conversation cannot be given to any template; the text names the field at `path`."""

    def __init__(self, path: FieldPath, problem: str) -> None:
        super().__init__(f"{field_name(path)} {problem}")
        self.path = path


class ToolArguments(dict[str, object]):
    """A tool call's arguments: an object that prints and concatenates as the client's JSON text.

    Most templates want the object and a few (DeepSeek's) paste the string: both work.
    """

    def __init__(self, value: dict[str, object], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self._text if isinstance(other, str) else NotImplemented


def shape_messages(job: RenderJob, shape: TemplateShape) -> list[JsonObject]:
    """The job's messages for a template of this shape. Raises UnusableMessages."""
    return [
        _shape_message(message, index, shape, job.image_placeholder)
        for index, message in enumerate(job.messages)
    ]


def _shape_message(
    message: JsonObject, index: int, shape: TemplateShape, placeholder: str
) -> JsonObject:
    shaped: JsonObject = {key: value for key, value in message.items() if value is not None}
    shaped["content"] = _shape_content(message.get("content"), shape, placeholder)
    if message.get("role") == "assistant":
        _shape_tool_calls(shaped, ("messages", index))
    _check_string(message, "tool_call_id", ("messages", index))
    for name in _REASONING_FIELDS:
        if (reasoning := shaped.get(name)) is not None:
            # Templates read it under three names; those that the client set stay as they are.
            return {**dict.fromkeys(_REASONING_FIELDS, reasoning), **shaped}
    return shaped


def _shape_content(content: object, shape: TemplateShape, placeholder: str) -> object:
    if content is None:
        if shape.tests_none:
            return None
        return [] if shape.wants_parts and not shape.tests_string else ""
    if isinstance(content, str):
        if shape.wants_parts and not shape.tests_string:
            return [{"type": "text", "text": content}]
        return content
    return content if shape.wants_parts else _join_parts(content, placeholder)


def _join_parts(content: object, placeholder: str) -> str:
    """One string: placeholders that the text does not hold itself stand first, a line each."""
    assert isinstance(content, list)
    text = "\n".join(part["text"] for part in content if part["type"] == "text")
    num_images = sum(part["type"] == "image" for part in content)
    if not num_images or not placeholder:
        return text
    num_missing = num_images - text.count(placeholder)
    return "\n".join([placeholder] * num_missing + [text])


def _shape_tool_calls(message: JsonObject, path: FieldPath) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise UnusableMessages((*path, "tool_calls"), "is not a list")
    if not calls:
        del message["tool_calls"]
        return
    message["tool_calls"] = [
        _shape_call(call, (*path, "tool_calls", index)) for index, call in enumerate(calls)
    ]


def _shape_call(call: object, path: FieldPath) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise UnusableMessages((*path, "function"), "is not an object")
    if not isinstance(function.get("name"), str):
        raise UnusableMessages((*path, "function", "name"), "is missing or no string")
    _check_string(call, "id", path)
    arguments = _read_arguments(function.get("arguments"), (*path, "function", "arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _check_string(value: JsonObject, name: str, path: FieldPath) -> None:
    if not isinstance(value.get(name), str | None):
        raise UnusableMessages((*path, name), "is no string")


def _read_arguments(arguments: object, path: FieldPath) -> dict[str, object]:
    """An object, whether the client sent one or, as OpenAI has it, the JSON text of one."""
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    if not isinstance(arguments, str):
        raise UnusableMessages(path, "is neither a string nor an object")
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except ValueError as error:
        raise UnusableMessages(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnusableMessages(path, "is not the JSON text of an object")
    return ToolArguments(value, arguments)
