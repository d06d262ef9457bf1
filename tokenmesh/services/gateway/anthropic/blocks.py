"""Content blocks that a client sends, by type, and the chat parts that they become."""

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from tokenmesh.services.gateway.http.errors import NotSupported
from tokenmesh.services.gateway.http.fields import Bounded
from tokenmesh.services.gateway.openai.translation import invalid, read_object


class _Block(Bounded):
    """Fields that do not reach the model (cache_control, citations, ...) are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)


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
    input: dict[str, Any]


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
