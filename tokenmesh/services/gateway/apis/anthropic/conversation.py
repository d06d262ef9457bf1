"""A client's system prompt, turns and content blocks as the messages of a chat request."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from tokenmesh.services.gateway.apis.anthropic.request import Message
from tokenmesh.services.gateway.apis.openai.translation import (
    ChatMessages,
    Json,
    arguments_text,
    chat_call,
    chat_content,
    read_object,
)
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.fields import Bounded
from tokenmesh.shared.errors import FieldPath


class _Block(Bounded, extra="allow", strict=True):
    """Fields that do not reach the model (cache_control, citations, ...) are ignored."""


class TextBlock(_Block):
    text: str


class ImageSource(_Block):
    type: Literal["base64", "url", "file"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]+$")] | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(_Block):
    source: ImageSource


class DocumentSource(_Block):
    """Plain text; other types would need text extraction and are refused."""

    type: str
    data: str = ""


class DocumentBlock(_Block):
    """A text that the conversation refers to."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(_Block):
    """A result of a search by the client."""

    source: str
    title: str
    content: list[TextBlock]


class ToolUseBlock(_Block):
    """A tool call in an earlier turn of the assistant."""

    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any] | str
    """A text is one that a client could not parse, such as that of a call that was cut."""


class ToolResultBlock(_Block):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block):
    """Reasoning in an earlier turn. The signature is not verified."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block):
    """Encrypted reasoning of another vendor's model; it is dropped."""

    data: str = ""


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)

_MODEL_BY_TYPE: Final[dict[str, type[Block]]] = {
    "text": TextBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}


def read_block(value: dict[str, Any], path: str, *allowed: str) -> Block:
    """One block of an allowed type. Raises InvalidInput that names its path."""
    kind = value.get("type")
    if not isinstance(kind, str):
        raise invalid(f"{path}.type", "is missing")
    if kind not in allowed:
        problem = "is not allowed here" if kind in _MODEL_BY_TYPE else "is not supported"
        known = ", ".join(allowed)
        raise invalid(
            f"{path}.type", f"{kind[:64]!r} {problem}; allowed types: {known}", NotSupported
        )
    return read_object(_MODEL_BY_TYPE[kind], value, path)


def chat_part(block: Block, path: str) -> dict[str, Any]:
    """A block of a user's turn or a tool's result as a part of a chat message."""
    if isinstance(block, ImageBlock):
        return {"type": "image_url", "image_url": {"url": _image_url(block.source, path)}}
    if isinstance(block, DocumentBlock):
        return {"type": "text", "text": _document_text(block, path)}
    if isinstance(block, SearchResultBlock):
        lines = [block.title, block.source, *(each.text for each in block.content)]
        return {"type": "text", "text": "\n".join(lines)}
    assert isinstance(block, TextBlock)
    return {"type": "text", "text": block.text}


def _image_url(source: ImageSource, path: str) -> str:
    """The URL of an image, or the id of an uploaded file."""
    name = {"base64": "data", "url": "url", "file": "file_id"}[source.type]
    value: str | None = getattr(source, name)
    if not value:
        raise invalid(f"{path}.source.{name}", "is missing")
    if source.type != "base64":
        return value
    if source.media_type is None:
        raise invalid(f"{path}.source.media_type", "is missing")
    return f"data:{source.media_type};base64,{value}"


def _document_text(block: DocumentBlock, path: str) -> str:
    """A document's title, context and text."""
    if block.source.type != "text":
        problem = f"{block.source.type[:64]!r} is not supported, only 'text' is"
        raise invalid(f"{path}.source.type", problem, NotSupported)
    return "\n".join(each for each in (block.title, block.context, block.source.data) if each)


INVALID_INPUT: Final = "INVALID_JSON"
"""Key of the input of a call that the model wrote wrong: it is its value, as text."""
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
            own = f"{path}[{index}]"
            block = read_block(value, own, *_ASSISTANT)
            if isinstance(block, ToolUseBlock):
                self._tool_by_call[block.id] = block.name
                arguments = arguments_text(block.input, INVALID_INPUT)
                place: FieldPath = ("messages", len(self.messages), "tool_calls", len(calls))
                self.sources[place] = own
                self.sources[*place, "function", "arguments"] = f"{own}.input"
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
