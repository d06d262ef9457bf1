"""Messages in the form that a template expects: content as string or parts, arguments as objects.

Follows vLLM for content parts and image placeholders, and transformers for nulls and reasoning, and
for continue_final_message: a mark is appended to the last message, and the rendering is cut there.
"""

import json
from collections.abc import Mapping
from typing import Final

from tokenmesh.services.tokenizer_svc.render_job import JsonObject, RenderJob
from tokenmesh.services.tokenizer_svc.template import TemplateShape
from tokenmesh.shared.errors import FieldPath, field_name
from tokenmesh.shared.text.surrogates import spells_half_of_a_pair

_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")


class UnusableMessages(Exception):
    """No template can render the conversation; the text names the field at `path`."""

    def __init__(self, path: FieldPath, problem: str) -> None:
        super().__init__(f"{field_name(path)} {problem}")
        self.path = path


class ToolArguments(dict[str, object]):
    """A tool call's arguments: an object that prints and concatenates as the client's JSON text.

    Most templates use the object, a few (DeepSeek's) concatenate the string.
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
        _shape_message(message, index, shape, job.placeholders)
        for index, message in enumerate(job.messages)
    ]


def _shape_message(
    message: JsonObject, index: int, shape: TemplateShape, placeholders: Mapping[str, str]
) -> JsonObject:
    shaped: JsonObject = {key: value for key, value in message.items() if value is not None}
    shaped["content"] = _shape_content(message.get("content"), shape, placeholders)
    if message.get("role") == "assistant":
        _shape_tool_calls(shaped, ("messages", index))
    _check_string(message, "tool_call_id", ("messages", index))
    for name in _REASONING_FIELDS:
        if (reasoning := shaped.get(name)) is not None:
            # Templates read it under three names; those that the client set stay as they are.
            return {**dict.fromkeys(_REASONING_FIELDS, reasoning), **shaped}
    return shaped


def _shape_content(
    content: object, shape: TemplateShape, placeholders: Mapping[str, str]
) -> object:
    if content is None:
        if shape.tests_none:
            return None
        return [] if shape.wants_parts and not shape.tests_string else ""
    if isinstance(content, str):
        if shape.wants_parts and not shape.tests_string:
            return [{"type": "text", "text": content}]
        return content
    return content if shape.wants_parts else _join_parts(content, placeholders)


def _join_parts(content: object, placeholders: Mapping[str, str]) -> str:
    """One string; placeholders that are missing in the text are put first, one on each line."""
    assert isinstance(content, list)
    text = "\n".join(part["text"] for part in content if part["type"] == "text")
    missing: list[str] = []
    for kind, placeholder in placeholders.items():
        num_items = sum(part["type"] == kind for part in content)
        missing += [placeholder] * (num_items - text.count(placeholder) if num_items else 0)
    has_items = any(part["type"] in placeholders for part in content)
    return "\n".join([*missing, text]) if has_items else text


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
        raise UnusableMessages((*path, "function", "name"), "is missing or not a string")
    _check_string(call, "id", path)
    arguments = _read_arguments(function.get("arguments"), (*path, "function", "arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _check_string(value: JsonObject, name: str, path: FieldPath) -> None:
    if not isinstance(value.get(name), str | None):
        raise UnusableMessages((*path, name), "is not a string")


def _read_arguments(arguments: object, path: FieldPath) -> dict[str, object]:
    """The arguments as an object; OpenAI's clients send their JSON text."""
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
    except RecursionError as error:
        raise UnusableMessages(path, "is nested too deeply") from error
    if spells_half_of_a_pair(arguments, value):
        raise UnusableMessages(path, "holds one half of a surrogate pair")
    if not isinstance(value, dict):
        raise UnusableMessages(path, "is not the JSON text of an object")
    return ToolArguments(value, arguments)


_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class CannotContinue(Exception):
    """The last message has no text, or the template changes it."""


def mark_end(messages: list[JsonObject], template: str) -> str:
    """Append the mark to the last message, in place; returns its text without the mark."""
    if not messages or "content" not in template:
        raise CannotContinue("continue_final_message: the template does not print any content")
    final = messages[-1]
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _MARK
        return content
    texts = [part for part in content if "text" in part] if isinstance(content, list) else []
    if not texts:
        raise CannotContinue("continue_final_message: the final message has no text to continue")
    text = str(texts[-1]["text"])
    texts[-1]["text"] = text + _MARK
    return text


def cut_at_mark(rendered: str, final_text: str) -> str:
    """The rendering up to where the last message's text ends."""
    if final_text.strip() not in rendered or _MARK.strip() not in rendered:
        raise CannotContinue(
            "continue_final_message: the template changes the final message, so it cannot be "
            "continued"
        )
    end = rendered.rindex(_MARK.strip())
    if rendered[end : end + len(_MARK)] == _MARK:
        return rendered[:end]
    # The template trimmed the message: the spaces before the mark are the template's, too.
    return rendered[:end].rstrip()
