"""Items: input and earlier output of responses as the messages of a chat.

Neighbours that one turn of the model made (reasoning, text, calls) become one message.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.responses.custom_tools import to_arguments
from tokenmesh.services.gateway.responses.parts import Content, read_content, read_text
from tokenmesh.services.gateway.responses.reading import get_optional_string, get_string, one_of
from tokenmesh.shared.errors import InvalidInput, NotFound

_ROLES: Final = ("user", "assistant", "system", "developer")
_SYSTEM_ROLES: Final = ("system", "developer")

Item = dict[str, Any]


class ItemsConversation:
    """Collects messages."""

    def __init__(self, server_tools: Mapping[tuple[str, str], str] | None = None) -> None:
        """`server_tools`: what the model calls an MCP tool, by its server's label and its name."""
        self._server_tools = server_tools or {}
        self.messages: list[Item] = []
        self.sources: dict[str, str] = {}
        """Of `messages[3]` and what is in it: where it came from."""
        self._call_ids: set[str] = set()
        self._leading: list[str] = []
        """Instructions that are one message, if nothing else has been said."""
        self._thoughts: list[tuple[Item, list[str]]] = []
        """Of turns with reasoning, its pieces: joined in `finish`, not with each of them."""
        self._readers: Final[dict[str, Callable[[Item, str], None]]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "mcp_call": self._mcp_call,
            "item_reference": _refuse_reference,
            # What a server offered and who approved is no part of the conversation.
            "mcp_list_tools": _skip,
            "mcp_approval_request": _skip,
            "mcp_approval_response": _skip,
        }

    def instruct(self, text: str) -> None:
        """Instructions come first."""
        self._instruct_more(text, "instructions")

    def finish(self) -> None:
        """Call it once, after the last item."""
        if self._leading:
            self.messages[0]["content"] = "\n\n".join(self._leading)
        for message, thoughts in self._thoughts:
            message["reasoning"] = "\n".join(thoughts)

    def add(self, item: Item, place: str) -> None:
        """Append an item; `place` is its path. Raises InvalidInput."""
        kind = item.get("type") or ("message" if "role" in item else None)
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            served = ", ".join(self._readers)
            told = (
                f"{place}.type is missing" if kind is None else f"{place}.type {kind!r} is unknown"
            )
            raise NotSupported(f"{told}; served are {served}"[:500], param=f"{place}.type")
        reader(item, place)

    def _message(self, item: Item, place: str) -> None:
        role = one_of(item.get("role"), _ROLES, f"{place}.role")
        if role == "assistant" and item.get("content") is not None:
            self._say(read_text(item, "content", place), place)
            return
        content = read_content(item, "content", place)
        if role in _SYSTEM_ROLES:
            self._instruct_more(content, place)
        else:
            self._add({"role": "user", "content": content}, place)

    def _instruct_more(self, content: Content, place: str) -> None:
        """Many templates take one system message, and only at the start: leading ones are one."""
        text = content if isinstance(content, str) else _joined(content)
        is_first = not self.messages
        if text is not None and self._leading and len(self.messages) == 1:
            self._leading.append(text)
            return
        self._add({"role": "system", "content": content if text is None else text}, place)
        if text is not None and is_first:
            self._leading.append(text)

    def _say(self, text: str, place: str) -> None:
        message = self._turn(place, ("content", "tool_calls"))
        message["content"] = text

    def _reasoning(self, item: Item, place: str) -> None:
        name = "content" if item.get("content") else "summary"
        text = read_text(item, name, place)
        if text:
            message = self._turn(place, ("content", "tool_calls"))
            if not self._thoughts or self._thoughts[-1][0] is not message:
                self._thoughts.append((message, []))
            self._thoughts[-1][1].append(text)

    def _function_call(self, item: Item, place: str) -> None:
        arguments = get_string(item, "arguments", place, is_empty_ok=True)
        self._call(item, arguments, place)

    def _custom_call(self, item: Item, place: str) -> None:
        self._call(item, to_arguments(get_string(item, "input", place, is_empty_ok=True)), place)

    def _call(self, item: Item, arguments: str, place: str) -> None:
        call_id = get_string(item, "call_id", place)
        if call_id in self._call_ids:
            where = f"{place}.call_id"
            raise InvalidInput(f"{where} {call_id[:80]!r} is there twice", param=where)
        function = {"name": get_string(item, "name", place), "arguments": arguments}
        self._add_call(call_id, function, place)

    def _mcp_call(self, item: Item, place: str) -> None:
        """A call that a gateway has made: what the model asked and what it was told."""
        call_id = get_string(item, "id", place)
        arguments = get_string(item, "arguments", place, is_empty_ok=True)
        name = get_string(item, "name", place)
        label = get_string(item, "server_label", place)
        name = self._server_tools.get((label, name), name)
        self._add_call(call_id, {"name": name, "arguments": arguments}, place)
        output = get_optional_string(item, "output", place)
        if output is None:
            output = f"error: {item.get('error') or 'the call was not made'}"
        self._add({"role": "tool", "tool_call_id": call_id, "content": output}, place)

    def _add_call(self, call_id: str, function: Item, place: str) -> None:
        calls = self._turn(place, ()).setdefault("tool_calls", [])
        path = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.sources[path] = self.sources[f"{path}.function"] = place
        calls.append({"id": call_id, "type": "function", "function": function})
        self._call_ids.add(call_id)

    def _output(self, item: Item, place: str) -> None:
        call_id = get_string(item, "call_id", place)
        if call_id not in self._call_ids:
            where = f"{place}.call_id"
            raise InvalidInput(f"{where}: there is no call {call_id[:80]!r} before it", param=where)
        content = read_content(item, "output", place)
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        self._add(message, place)
        self.sources[f"messages[{len(self.messages) - 1}].content"] = f"{place}.output"

    def _turn(self, place: str, ends_after: tuple[str, ...]) -> Item:
        """The model's open turn; a new one where it already has what `ends_after` names."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(last.get(n) for n in ends_after):
            last = {"role": "assistant", "content": ""}
            self._add(last, place)
        return last

    def _add(self, message: Item, place: str) -> None:
        self.sources[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)


def _joined(parts: list[Item]) -> str | None:
    """The text of parts that are nothing else."""
    if any(part["type"] != "text" for part in parts):
        return None
    return "".join(part["text"] for part in parts)


def _skip(item: Item, place: str) -> None:
    """Nothing for the model."""


def _refuse_reference(item: Item, place: str) -> None:
    raise no_such_item(get_string(item, "id", place), place)


def no_such_item(item_id: str, place: str) -> NotFound:
    """The error for a reference to nothing."""
    return NotFound(f"{place}.id: there is no stored item {item_id[:80]!r}", param=f"{place}.id")
