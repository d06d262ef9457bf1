"""Items: input and earlier output of responses as the messages of a chat, and as clients list them.

Adjacent items of one model turn (reasoning, text, calls) become one message.
"""

from collections.abc import Callable, Mapping
from typing import Final, Literal

from tokenmesh.services.gateway.apis.openai.translation import (
    ChatMessages,
    Json,
    get_objects,
    get_optional_string,
    get_string,
    one_of,
)
from tokenmesh.services.gateway.apis.responses.output_items import input_item_id
from tokenmesh.services.gateway.apis.responses.records import ResponseBegun
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.tools import ToolName, to_arguments
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.shared.errors import NotFound

_ROLES: Final = ("user", "assistant", "system", "developer")
_SYSTEM_ROLES: Final = ("system", "developer")
_FIELD_BY_TYPE: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "reasoning_text": "text",
}
_TEXT_TYPES: Final = tuple(_FIELD_BY_TYPE)
_MEDIA_TYPES: Final = ("input_image", "image_url", "input_audio", "audio_url", "video_url")
_KNOWN_TYPES: Final = ("input_text", "output_text", "refusal", "input_image")
_DETAILS: Final = ("low", "high", "auto", "original")

Content = str | list[Json]


class ItemsConversation(ChatMessages):
    """Every method raises InvalidInput that names the client's path."""

    def __init__(self, function_names: Mapping[ToolName, str] | None = None) -> None:
        """`function_names`: what the model knows the tools by."""
        super().__init__()
        self._function_names = function_names or {}
        self._call_ids: set[str] = set()
        self._leading: list[str] = []
        """Instructions at the start, which become one message."""
        self._reasoning: list[tuple[Json, list[str]]] = []
        """Messages with reasoning and its texts: joined once, in `finish`."""
        self._readers: Final[dict[str, Callable[[Json, str], None]]] = {
            "message": self._add_message,
            "reasoning": self._add_reasoning,
            "function_call": self._add_function_call,
            "custom_tool_call": self._add_custom_call,
            "function_call_output": self._add_output,
            "custom_tool_call_output": self._add_output,
            "mcp_call": self._add_mcp_call,
            "item_reference": _refuse_reference,
            # Listings and approvals of MCP tools are not shown to the model.
            "mcp_list_tools": _skip,
            "mcp_approval_request": _skip,
            "mcp_approval_response": _skip,
        }

    def add_item(self, item: Json, path: str) -> None:
        """Append an item; `path` is its path in the request."""
        kind = item.get("type") or ("message" if "role" in item else None)
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            problem = "is missing" if kind is None else f"{kind!r} is unknown"
            known = ", ".join(self._readers)
            raise invalid(
                f"{path}.type", f"{problem}; supported types: {known}"[:500], NotSupported
            )
        reader(item, path)

    def add_instructions(self, content: Content, path: str) -> None:
        """Leading instructions are joined into one system message: many chat templates accept
        only one, and only at the start."""
        text = content if isinstance(content, str) else _joined(content)
        is_first = not self.messages
        if text is not None and self._leading and len(self.messages) == 1:
            self._leading.append(text)
            return
        self.add({"role": "system", "content": content if text is None else text}, path)
        if text is not None and is_first:
            self._leading.append(text)

    def finish(self) -> None:
        """Join instructions and reasoning; call it once, after the last item."""
        if self._leading:
            self.messages[0]["content"] = "\n\n".join(self._leading)
        for message, texts in self._reasoning:
            message["reasoning"] = "\n".join(texts)

    def _add_message(self, item: Json, path: str) -> None:
        role = one_of(item.get("role"), _ROLES, f"{path}.role")
        if role == "assistant" and item.get("content") is not None:
            text = _read_text(item, "content", path)
            self.assistant_turn(path, ("content", "tool_calls"))["content"] = text
            return
        content = _read_content(item, "content", path)
        if role in _SYSTEM_ROLES:
            self.add_instructions(content, path)
        else:
            self.add({"role": "user", "content": content}, path)

    def _add_reasoning(self, item: Json, path: str) -> None:
        text = _read_text(item, "content" if item.get("content") else "summary", path)
        if text:
            message = self.assistant_turn(path, ("content", "tool_calls"))
            if not self._reasoning or self._reasoning[-1][0] is not message:
                self._reasoning.append((message, []))
            self._reasoning[-1][1].append(text)

    def _add_function_call(self, item: Json, path: str) -> None:
        arguments = get_string(item, "arguments", path, is_empty_ok=True)
        self._add_new_call(item, "function", arguments, path)

    def _add_custom_call(self, item: Json, path: str) -> None:
        arguments = to_arguments(get_string(item, "input", path, is_empty_ok=True))
        self._add_new_call(item, "custom", arguments, path)

    def _add_new_call(
        self, item: Json, kind: Literal["function", "custom"], arguments: str, path: str
    ) -> None:
        call_id = get_string(item, "call_id", path)
        if call_id in self._call_ids:
            raise invalid(f"{path}.call_id", f"{call_id[:80]!r} appears twice")
        self._call_ids.add(call_id)
        tool = ToolName(
            kind,
            name=get_string(item, "name", path),
            namespace=get_optional_string(item, "namespace", path) or None,
        )
        self.add_call(call_id, self._name_of(tool), arguments, path)

    def _name_of(self, tool: ToolName) -> str:
        found = self._function_names.get(tool)
        return tool.flat_name if found is None else found

    def _add_mcp_call(self, item: Json, path: str) -> None:
        """A call that a gateway has made, and its result."""
        call_id = get_string(item, "id", path)
        arguments = get_string(item, "arguments", path, is_empty_ok=True)
        name = get_string(item, "name", path)
        label = get_string(item, "server_label", path)
        self._call_ids.add(call_id)
        self.add_call(call_id, self._name_of(ToolName("mcp", label, name)), arguments, path)
        output = get_optional_string(item, "output", path)
        if output is None:
            output = f"error: {item.get('error') or 'the call was not made'}"
        self.add({"role": "tool", "tool_call_id": call_id, "content": output}, path)

    def _add_output(self, item: Json, path: str) -> None:
        call_id = get_string(item, "call_id", path)
        if call_id not in self._call_ids:
            raise invalid(f"{path}.call_id", f"{call_id[:80]!r} matches no earlier call")
        content = _read_content(item, "output", path)
        self.add({"role": "tool", "tool_call_id": call_id, "content": content}, path)
        self.sources["messages", len(self.messages) - 1, "content"] = f"{path}.output"


def no_such_item(item_id: str, path: str) -> NotFound:
    """The error for a reference to an item that is not stored."""
    return NotFound(f"{path}.id {item_id[:80]!r} matches no stored item", param=f"{path}.id")


def _refuse_reference(item: Json, path: str) -> None:
    raise no_such_item(get_string(item, "id", path), path)


def _skip(item: Json, path: str) -> None:
    pass


def _joined(parts: list[Json]) -> str | None:
    """The text of parts that are all text; None for others."""
    if any(part["type"] != "text" for part in parts):
        return None
    return "".join(part["text"] for part in parts)


def _read_content(holder: Json, name: str, path: str) -> Content:
    """A string, or a list of chat parts."""
    value = holder.get(name)
    if isinstance(value, str):
        return value
    if value is None:
        raise invalid(f"{path}.{name}", "is missing")
    if not isinstance(value, list):
        raise invalid(f"{path}.{name}", "must be a string or a list of parts")
    parts = get_objects(holder, name, path)
    return [_read_part(part, f"{path}.{name}[{index}]") for index, part in enumerate(parts)]


def _read_text(holder: Json, name: str, path: str) -> str:
    """A string, or text parts joined."""
    value = holder.get(name)
    if isinstance(value, str):
        return value
    parts = get_objects(holder, name, path)
    return "".join(
        _read_text_part(part, f"{path}.{name}[{index}]") for index, part in enumerate(parts)
    )


def _read_text_part(part: Json, path: str) -> str:
    kind = one_of(part.get("type"), _TEXT_TYPES, f"{path}.type")
    return get_string(part, _FIELD_BY_TYPE[kind], path, is_empty_ok=True)


def _read_part(part: Json, path: str) -> Json:
    kind = part.get("type")
    if kind in _TEXT_TYPES:
        return {"type": "text", "text": _read_text_part(part, path)}
    if kind == "input_file":
        raise invalid(f"{path}.type", "'input_file' is not supported", NotSupported)
    if kind not in _MEDIA_TYPES:
        one_of(kind, _KNOWN_TYPES, f"{path}.type")
    return _read_image(part, path) if kind == "input_image" else part


def _read_image(part: Json, path: str) -> Json:
    if part.get("detail") is not None:
        one_of(part["detail"], _DETAILS, f"{path}.detail")
    url = get_optional_string(part, "image_url", path)
    source = url or get_optional_string(part, "file_id", path)
    uuid = get_optional_string(part, "uuid", path)
    if not source and not uuid:
        raise invalid(f"{path}.image_url", "is missing: send it or file_id")
    image: Json = {"type": "image_url"}
    if source:
        image["image_url"] = {"url": source}
    return image | ({"uuid": uuid} if uuid else {})


_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def input_items(begun: ResponseBegun) -> list[Json]:
    """Input items of a response with their ids, oldest first."""
    return request_items(begun.request(), begun.id)


def request_items(body: ResponsesRequest, response_id: str) -> list[Json]:
    """The same for its request."""
    return [_input_item(item, index, response_id) for index, item in enumerate(body.items)]


def _input_item(item: Json, index: int, response_id: str) -> Json:
    return shaped_item(item, input_item_id(item_prefix(item), response_id, index))


def item_prefix(item: Json) -> str:
    """Return what the id of an item begins with."""
    return _PREFIXES.get(item.get("type") or "message", "item")


def shaped_item(item: Json, item_id: str) -> Json:
    """An item as OpenAI lists it; an id of its own counts before `item_id`."""
    kind = item.get("type") or "message"
    shaped = {
        "id": item_id,
        "type": kind,
        **{key: each for key, each in item.items() if each is not None},
    }
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        shaped["content"] = [{"type": part, "text": content}]
    if kind == "message":
        shaped.setdefault("status", "completed")
    return shaped


def page(
    items: list[Json], *, limit: int, order: str, after: str | None, before: str | None
) -> Json:
    """A page of items as OpenAI's list object. Raises InvalidInput for an unknown id."""
    if order == "desc":
        items = items[::-1]
    ids = [item["id"] for item in items]
    start = _index(ids, after, "after") + 1 if after is not None else 0
    end = _index(ids, before, "before") if before is not None else len(items)
    found = items[start:end]
    # With `before` alone the page ends at that item.
    shown = found[-limit:] if before is not None and after is None else found[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(found),
    }


def _index(ids: list[str], wanted: str, param: str) -> int:
    if wanted not in ids:
        raise invalid(param, f"{wanted[:80]!r} matches no input item")
    return ids.index(wanted)
