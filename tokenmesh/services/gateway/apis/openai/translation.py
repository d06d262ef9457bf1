"""Translation of another API's request into a chat request, shared by all such APIs.

`ChatMessages` collects the messages and the client's path of each. `TranslatedChat` is the
validated chat request; its errors are renamed to the paths of the client's own body (`FieldNames`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tokenmesh.services.gateway.apis.openai.request import ChatRequest
from tokenmesh.services.gateway.core.http.errors import invalid, invalid_fields
from tokenmesh.shared.errors import FieldPath, InvalidInput, TokenMeshError, field_name


class FieldNames:
    """Maps paths in a chat to names in the client's body."""

    def __init__(self, names: Mapping[str, str], sources: Mapping[FieldPath, str]) -> None:
        """`names`: of fields such as `max_tokens`; `sources`: of paths in messages and tools."""
        self._names: dict[FieldPath, str] = {
            tuple(field.split(".")): name for field, name in names.items()
        }
        self._names |= sources

    def name_of(self, path: FieldPath) -> str:
        """The client's name: the longest known beginning of the path is replaced."""
        for end in range(len(path), 0, -1):
            name = self._names.get(path[:end])
            if name is not None:
                return field_name((name, *path[end:]))
        return field_name(path)

    def rename(self, error: TokenMeshError) -> TokenMeshError:
        """The same error with the client's names; only InvalidInput names fields."""
        if not isinstance(error, InvalidInput) or not error.path:
            return error
        name = self.name_of(error.path)
        return error if name == field_name(error.path) else error.renamed(name)


Json = dict[str, Any]

_Model = TypeVar("_Model", bound=BaseModel)
_MAX_UNKNOWN = 16
_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedChat:
    """A chat request made from a request of another API."""

    chat: ChatRequest
    fields: FieldNames

    @contextmanager
    def client_paths(self) -> Iterator[None]:
        """Errors that the block raises name fields of the client's body."""
        try:
            yield
        except TokenMeshError as error:
            raise self.fields.rename(error) from None


class ChatMessages:
    """Messages in order. `sources` maps their paths to the client's names."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.sources: dict[FieldPath, str] = {}

    def add(self, message: Json, path: str, parts: Sequence[str] = ()) -> None:
        """Append a message. `parts`: the client's paths of its content parts."""
        own: FieldPath = ("messages", len(self.messages))
        self.sources[own] = path
        for index, part in enumerate(parts):
            self.sources[*own, "content", index] = part
        self.messages.append(message)

    def assistant_turn(self, path: str, closed_by: Sequence[str] = ()) -> Json:
        """The last message if it is the assistant's and has none of the fields `closed_by`.

        Otherwise a new one.
        """
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(last.get(n) for n in closed_by):
            last = {"role": "assistant", "content": ""}
            self.add(last, path)
        return last

    def add_call(self, call_id: str, name: str, arguments: str, path: str) -> None:
        """Append a tool call to the assistant's last message."""
        calls = self.assistant_turn(path).setdefault("tool_calls", [])
        own = ("messages", len(self.messages) - 1, "tool_calls", len(calls))
        self.sources[own] = self.sources[*own, "function"] = path
        calls.append(chat_call(call_id, name, arguments))


def chat_call(call_id: str, name: str, arguments: str) -> Json:
    """A tool call of an assistant's message; `arguments` is JSON text."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def arguments_text(arguments: Json | str, invalid_key: str) -> str:
    """The text of a call's arguments in an API that has them as an object.

    `invalid_key`: under which we show a text that is not the JSON of an object.
    """
    if isinstance(arguments, str):
        return arguments
    text = arguments.get(invalid_key)
    if isinstance(text, str) and len(arguments) == 1:
        return text
    return json.dumps(arguments, ensure_ascii=False)


def chat_content(parts: list[Json]) -> str | list[Json]:
    """A single text as a string, because every chat template accepts that."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def schema_format(schema: Json) -> Json:
    """A `response_format` of an API that has no name for the schema."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": schema, "strict": True},
    }


def function_sources(count: int, parameters: str = "parameters") -> dict[FieldPath, str]:
    """Client paths of functions that the client writes without an object `function`."""
    sources: dict[FieldPath, str] = {}
    for index in range(count):
        sources["tools", index, "function"] = f"tools[{index}]"
        sources["tools", index, "function", "parameters"] = f"tools[{index}].{parameters}"
    return sources


def validate_chat(fields: Mapping[str, Any], names: FieldNames) -> ChatRequest:
    """Raises InvalidInput that names the client's fields."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error, name_of=names.name_of) from None


def read_object(model: type[_Model], value: object, path: str) -> _Model:
    """An object inside a body. Raises InvalidInput that names its path."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_fields(error, path) from None


def get_string(holder: Json, name: str, path: str, *, is_empty_ok: bool = False) -> str:
    """A required string. Raises InvalidInput."""
    value = get_optional_string(holder, name, path)
    if value is None:
        raise invalid(f"{path}.{name}", "is missing")
    if not value and not is_empty_ok:
        raise invalid(f"{path}.{name}", "is empty")
    return value


def get_optional_string(holder: Json, name: str, path: str) -> str | None:
    """A string, or None if it is null or missing. Raises InvalidInput."""
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{path}.{name}", "must be a string")
    return value


def get_objects(holder: Json, name: str, path: str) -> list[Json]:
    """A list of objects; empty if it is null or missing. Raises InvalidInput."""
    values: Any = holder.get(name)
    if values is None:
        return []
    if not isinstance(values, list):
        raise invalid(f"{path}.{name}", "must be a list")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise invalid(f"{path}.{name}[{index}]", "must be an object")
    return values


def one_of(value: object, allowed: tuple[str, ...], path: str) -> str:
    """One of several strings. Raises InvalidInput that lists them."""
    if not isinstance(value, str) or value not in allowed:
        shown = "missing" if value is None else repr(value)[:60]
        raise invalid(path, f"is {shown}: must be one of {', '.join(allowed)}")
    return value


def warn_unknown(names: Sequence[str], warnings: list[str]) -> None:
    """Add a warning that lists fields of the body that are not known."""
    if names:
        shown = ", ".join(name[:_MAX_NAME_CHARS] for name in names[:_MAX_UNKNOWN])
        warnings.append(f"unknown fields ignored: {shown}")
