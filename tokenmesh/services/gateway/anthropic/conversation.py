"""A client's system prompt and turns as the messages of a chat request."""

import json
from typing import Any, Final

from tokenmesh.services.gateway.anthropic.blocks import (
    Block,
    ImageBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    chat_part,
    read_block,
)
from tokenmesh.services.gateway.anthropic.request import Message
from tokenmesh.services.gateway.openai.translation import (
    ChatMessages,
    Json,
    chat_call,
    chat_content,
    invalid,
)

_CONTENT: Final = ("text", "image", "document", "search_result")
"""Types of blocks in a user's turn or in a tool's result."""
_ASSISTANT: Final = ("text", "thinking", "redacted_thinking", "tool_use")
_BILLING: Final = "x-anthropic-billing-header:"
"""Such a block of the system prompt is for Anthropic's billing and differs in every request. With
it no two prompts would share a prefix in the cache, so it is dropped."""


class MessagesConversation(ChatMessages):
    """Every method raises InvalidInput that names the client's path."""

    def __init__(self) -> None:
        super().__init__()
        self._tool_by_call: dict[str, str] = {}

    def add_system(self, system: str | list[Json] | None, path: str = "system") -> None:
        """Add a system prompt."""
        if isinstance(system, list):
            blocks = [
                read_block(each, f"{path}[{index}]", "text") for index, each in enumerate(system)
            ]
            texts = [each.text for each in blocks if isinstance(each, TextBlock)]
            system = "\n".join(each for each in texts if not each.startswith(_BILLING))
        if system:
            self.add({"role": "system", "content": system}, path)

    def add_turn(self, message: Message, path: str) -> None:
        """Add one turn; `path` is that of its content."""
        content = message.content
        if message.role == "system":
            self.add_system(content, path)
        elif isinstance(content, str):
            self.add({"role": message.role, "content": content}, path)
        elif not content:
            raise invalid(path, "is empty: send at least one block")
        elif message.role == "user":
            self._add_user(content, path)
        else:
            self._add_assistant(content, path)

    def _add_user(self, content: list[Json], path: str) -> None:
        """A tool's result is a message of its own, between those of the user's other blocks."""
        parts = _Parts()
        for index, value in enumerate(content):
            own = f"{path}[{index}]"
            block = read_block(value, own, *_CONTENT, "tool_result")
            if isinstance(block, ToolResultBlock):
                parts = self._flush(parts, path)
                self._add_result(block, own, parts)
            else:
                parts.add(block, own)
        self._flush(parts, path)

    def _flush(self, parts: "_Parts", path: str) -> "_Parts":
        """Add the collected parts as a message, and return an empty collection."""
        if parts.parts:
            self.add({"role": "user", "content": chat_content(parts.parts)}, path, parts.paths)
        return _Parts()

    def _add_result(self, block: ToolResultBlock, path: str, following: "_Parts") -> None:
        """Chat templates accept only text from a tool: images are moved to the user's `following`
        message."""
        tool = self._tool_by_call.get(block.tool_use_id)
        if tool is None:
            call_id = block.tool_use_id[:64]
            raise invalid(f"{path}.tool_use_id", f"{call_id!r} matches no earlier tool_use block")
        text, parts = "", _Parts()
        if isinstance(block.content, str):
            text = block.content
        for index, value in enumerate(block.content if isinstance(block.content, list) else ()):
            own = f"{path}.content[{index}]"
            part = read_block(value, own, *_CONTENT)
            (following if isinstance(part, ImageBlock) else parts).add(part, own)
        text += "\n".join(part["text"] for part in parts.parts)
        content = f"Error: {text}" if block.is_error else text
        message = {"role": "tool", "tool_call_id": block.tool_use_id, "name": tool}
        self.add({**message, "content": content}, path)

    def _add_assistant(self, content: list[Json], path: str) -> None:
        texts, reasoning, calls = list[str](), list[str](), list[Json]()
        for index, value in enumerate(content):
            block = read_block(value, f"{path}[{index}]", *_ASSISTANT)
            if isinstance(block, ToolUseBlock):
                self._tool_by_call[block.id] = block.name
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(chat_call(block.id, block.name, arguments))
            elif isinstance(block, ThinkingBlock):
                reasoning.append(block.thinking)
            elif isinstance(block, TextBlock):
                texts.append(block.text)
            else:
                assert isinstance(block, RedactedThinkingBlock)
        message: Json = {"role": "assistant", "content": "".join(texts)}
        if any(reasoning):
            message["reasoning"] = "\n".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        self.add(message, path)


class _Parts:
    """Content parts of one message, and the client's path of each."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        self.paths: list[str] = []

    def add(self, block: Block, path: str) -> None:
        self.parts.append(chat_part(block, path))
        self.paths.append(path)
