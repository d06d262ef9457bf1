"""A client's system prompt and turns as the messages of a chat request."""

import json
from collections.abc import Sequence
from typing import Any, Final

from tokenmesh.services.gateway.anthropic.blocks import (
    Block,
    DocumentBlock,
    ImageBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    document_text,
    image_url,
    read_block,
    search_result_text,
)
from tokenmesh.services.gateway.anthropic.request import Message
from tokenmesh.services.gateway.openai.field_places import Places
from tokenmesh.shared.errors import InvalidInput

_SAID: Final = ("text", "image", "document", "search_result")
"""Types of what may stand in a user's turn or in a tool's result."""

_BILLING: Final = "x-anthropic-billing-header:"
"""Such a block of the system prompt is for Anthropic's own accounts, and different in every
request: it would only keep prompts from being found in the cache."""

_Json = dict[str, Any]


class MessagesConversation:
    """Builds `messages`, and `places` beside them."""

    def __init__(self, places: Places) -> None:
        self.messages: list[_Json] = []
        self._places = places
        self._tool_by_id: dict[str, str] = {}

    def add_system(self, system: str | list[_Json] | None, place: str = "system") -> None:
        """The system prompt. Raises InvalidInput."""
        if isinstance(system, list):
            blocks = [
                read_block(each, f"{place}[{index}]", "text") for index, each in enumerate(system)
            ]
            texts = [each.text for each in blocks if isinstance(each, TextBlock)]
            system = "\n".join(each for each in texts if not each.startswith(_BILLING))
        if system:
            self._add({"role": "system", "content": system}, place)

    def add(self, message: Message, place: str) -> None:
        """One turn. Raises InvalidInput."""
        content = message.content
        if message.role == "system":
            self.add_system(content, f"{place}.content")
        elif isinstance(content, str):
            self._add({"role": message.role, "content": content}, f"{place}.content")
        elif not content:
            where = f"{place}.content"
            raise InvalidInput(f"{where} is empty: send at least one block", param=where)
        elif message.role == "user":
            self._add_user(content, f"{place}.content")
        else:
            self._add_assistant(content, f"{place}.content")

    def _add(self, message: _Json, place: str, parts: Sequence[str] = ()) -> None:
        self.messages.append(message)
        self._places.add(place, list(parts))

    def _add_user(self, content: list[_Json], place: str) -> None:
        """Results of tools are messages of their own, in front of what else the user says."""
        said = _Parts()
        for index, value in enumerate(content):
            where = f"{place}[{index}]"
            block = read_block(value, where, *_SAID, "tool_result")
            if isinstance(block, ToolResultBlock):
                self._flush(said, place)
                self._add_result(block, where, said)
            else:
                said.add(block, where)
        self._flush(said, place)

    def _flush(self, said: "_Parts", place: str) -> None:
        if said.parts:
            self._add({"role": "user", "content": said.content()}, place, said.places)
            said.clear()

    def _add_result(self, block: ToolResultBlock, place: str, said: "_Parts") -> None:
        """Templates write text for a tool: its images become the user's next words."""
        tool = self._tool_by_id.get(block.tool_use_id)
        if tool is None:
            where = f"{place}.tool_use_id"
            raise InvalidInput(
                f"{where}: no tool_use block before it has the id {block.tool_use_id[:64]!r}",
                param=where,
            )
        text, shown = "", _Parts()
        if isinstance(block.content, str):
            text = block.content
        for index, value in enumerate(block.content if isinstance(block.content, list) else ()):
            where = f"{place}.content[{index}]"
            part = read_block(value, where, *_SAID)
            (said if isinstance(part, ImageBlock) else shown).add(part, where)
        text += "\n".join(part["text"] for part in shown.parts)
        self._add(
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "name": tool,
                "content": f"Error: {text}" if block.is_error else text,
            },
            place,
        )

    def _add_assistant(self, content: list[_Json], place: str) -> None:
        texts, thoughts, calls = list[str](), list[str](), list[_Json]()
        for index, value in enumerate(content):
            block = read_block(
                value, f"{place}[{index}]", "text", "thinking", "redacted_thinking", "tool_use"
            )
            if isinstance(block, ToolUseBlock):
                self._tool_by_id[block.id] = block.name
                calls.append(_call(block))
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, TextBlock):
                texts.append(block.text)
            else:
                assert isinstance(block, RedactedThinkingBlock)
        message: _Json = {"role": "assistant", "content": "".join(texts)}
        if any(thoughts):
            message["reasoning"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._add(message, place)


class _Parts:
    """Parts of one message that is being put together."""

    def __init__(self) -> None:
        self.parts: list[_Json] = []
        self.places: list[str] = []

    def add(self, block: Block, place: str) -> None:
        self.parts.append(_part(block, place))
        self.places.append(place)

    def content(self) -> str | list[_Json]:
        """A single text as a string: every template takes that."""
        first = self.parts[0]
        if len(self.parts) == 1 and first["type"] == "text":
            return str(first["text"])
        return self.parts

    def clear(self) -> None:
        self.parts, self.places = [], []


def _part(block: Block, place: str) -> _Json:
    if isinstance(block, ImageBlock):
        return {"type": "image_url", "image_url": {"url": image_url(block, place)}}
    if isinstance(block, DocumentBlock):
        return {"type": "text", "text": document_text(block, place)}
    if isinstance(block, SearchResultBlock):
        return {"type": "text", "text": search_result_text(block)}
    assert isinstance(block, TextBlock)
    return {"type": "text", "text": block.text}


def _call(block: ToolUseBlock) -> _Json:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }
