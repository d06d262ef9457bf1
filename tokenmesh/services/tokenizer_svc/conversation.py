"""Messages in the form that a template expects: content as string or parts, arguments as objects.

Follows vLLM for content parts and image placeholders, and transformers for nulls and reasoning, and
for continue_final_message: a mark is appended to the last message, and the rendering is cut there.
"""

import json
from collections.abc import Callable, Mapping
from typing import Final

from tokenmesh.services.tokenizer_svc.render_job import JsonObject, RenderJob
from tokenmesh.services.tokenizer_svc.template import TemplateShape
from tokenmesh.shared.errors import FieldPath, field_name
from tokenmesh.shared.messages.tokenize import FieldWarning
from tokenmesh.shared.text.surrogates import spells_half_of_a_pair

_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
_MAX_WARNINGS: Final = 16
"""The most warnings of one conversation; a response shows no more."""


class UnusableMessages(Exception):
    """No template can render the conversation; the text names the field at `path`."""

    def __init__(self, path: FieldPath, problem: str) -> None:
        super().__init__(f"{field_name(path)} {problem}")
        self.path = path


class ToolArguments(dict[str, object]):
    """A tool call's arguments: an object that prints and concatenates as the client's JSON text.

    Most templates use the object, a few (DeepSeek's) concatenate the string. The text may be one
    that is not the JSON of an object, such as that of a call that `max_tokens` has cut: then the
    object is empty.
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


def shape_messages(
    job: RenderJob, shape_of: Callable[[str], TemplateShape], warnings: list[FieldWarning]
) -> list[JsonObject]:
    """The job's messages in the shape that the template expects for their roles.

    Adds warnings about what is not shown as it was sent. Raises UnusableMessages.
    """
    return [
        _shape_message(message, index, shape_of(str(message.get("role"))), job, warnings)
        for index, message in enumerate(job.messages)
    ]


def _shape_message(
    message: JsonObject,
    index: int,
    shape: TemplateShape,
    job: RenderJob,
    warnings: list[FieldWarning],
) -> JsonObject:
    shaped: JsonObject = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if message.get("role") != "user" and shape.takes_strings and _is_text(content):
        # Templates read parts of the user. What others say they print, or read its first part.
        content = join_parts(content, {})
    shaped["content"] = _shape_content(content, shape, job.placeholders)
    if message.get("role") == "assistant":
        _shape_tool_calls(shaped, ("messages", index), warnings)
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
        return "" if shape.takes_strings else []
    if isinstance(content, str):
        return content if shape.takes_strings else [{"type": "text", "text": content}]
    return content if shape.wants_parts else join_parts(content, placeholders)


def _is_text(content: object) -> bool:
    """Return whether it is a list of parts that are all text."""
    return isinstance(content, list) and all(part["type"] == "text" for part in content)


def join_parts(content: object, placeholders: Mapping[str, str]) -> str:
    """One string; placeholders that are missing in the text are put first, one on each line."""
    assert isinstance(content, list)
    text = "\n".join(part["text"] for part in content if part["type"] == "text")
    missing: list[str] = []
    for kind, placeholder in placeholders.items():
        num_items = sum(part["type"] == kind for part in content)
        missing += [placeholder] * (num_items - text.count(placeholder) if num_items else 0)
    has_items = any(part["type"] in placeholders for part in content)
    return "\n".join([*missing, text]) if has_items else text


def _shape_tool_calls(message: JsonObject, path: FieldPath, warnings: list[FieldWarning]) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise UnusableMessages((*path, "tool_calls"), "is not a list")
    if not calls:
        del message["tool_calls"]
        return
    message["tool_calls"] = [
        _shape_call(call, (*path, "tool_calls", index), warnings)
        for index, call in enumerate(calls)
    ]


def _shape_call(call: object, path: FieldPath, warnings: list[FieldWarning]) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise UnusableMessages((*path, "function"), "is not an object")
    if not isinstance(function.get("name"), str):
        raise UnusableMessages((*path, "function", "name"), "is missing or not a string")
    _check_string(call, "id", path)
    where = (*path, "function", "arguments")
    arguments = _read_arguments(function.get("arguments"), where, warnings)
    return {**call, "function": {**function, "arguments": arguments}}


def _check_string(value: JsonObject, name: str, path: FieldPath) -> None:
    if not isinstance(value.get(name), str | None):
        raise UnusableMessages((*path, name), "is not a string")


def _read_arguments(
    arguments: object, path: FieldPath, warnings: list[FieldWarning]
) -> dict[str, object]:
    """The arguments as an object; OpenAI's clients send their JSON text.

    A text without an object is taken back, too: a model has written it, and a client that keeps the
    conversation has nothing else to send. Templates that need an object get an empty one.
    """
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    if not isinstance(arguments, str):
        raise UnusableMessages(path, "is neither a string nor an object")
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
        problem = None if isinstance(value, dict) else "is not the JSON text of an object"
        if spells_half_of_a_pair(arguments, value):
            problem = "holds one half of a surrogate pair"
    except ValueError:
        problem = "is not JSON"
    except RecursionError:
        problem = "is nested too deeply"
    if problem is None:
        return ToolArguments(value, arguments)
    if len(warnings) < _MAX_WARNINGS:
        warnings.append(FieldWarning(path, f"{problem}: templates that need an object get {{}}"))
    return ToolArguments({}, arguments)


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
