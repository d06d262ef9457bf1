"""Content blocks that a client sends: each type with its fields, read with its place for errors."""

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.services.gateway.openai.errors import NotSupported, invalid_fields
from tokenmesh.shared.errors import InvalidInput

_Model = TypeVar("_Model", bound=BaseModel)


class _Block(Bounded):
    """Fields that are no matter for the model (cache_control, citations, ...) pass."""

    model_config = ConfigDict(extra="allow", strict=True)


class TextBlock(_Block):
    """Words."""

    text: str


class ImageSource(_Block):
    """Where an image is."""

    type: Literal["base64", "url", "file"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]+$")] | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(_Block):
    """An image."""

    source: ImageSource


class DocumentSource(_Block):
    """Plain text; what would have to be extracted from a file is refused."""

    type: str
    data: str = ""


class DocumentBlock(_Block):
    """A text that the conversation is about."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(_Block):
    """What a client's own search found."""

    source: str
    title: str
    content: list[TextBlock]


class ToolUseBlock(_Block):
    """A call that the model made earlier."""

    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """What came of it."""

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block):
    """What the model thought earlier. The signature is not looked at."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block):
    """Of another vendor's model, unreadable for any other."""

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


def read_block(value: dict[str, Any], place: str, *allowed: str) -> Block:
    """One block of an allowed type. Raises InvalidInput that names the place."""
    kind = value.get("type")
    if not isinstance(kind, str):
        raise InvalidInput(f"{place}.type is missing", param=f"{place}.type")
    if kind not in allowed:
        known = "" if kind in _MODEL_BY_TYPE else " is not supported and"
        raise NotSupported(
            f"{place}.type: {kind[:64]!r}{known} cannot stand here; possible: {', '.join(allowed)}",
            param=f"{place}.type",
        )
    return read_part(_MODEL_BY_TYPE[kind], value, place)


def read_part(model: type[_Model], value: object, place: str) -> _Model:
    """A part of a body. Raises InvalidInput that names the place."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_fields(error, place) from None


def image_url(block: ImageBlock, place: str) -> str:
    """The image as the URL that a chat request has in this place, or an upload's id."""
    source = block.source
    name = {"base64": "data", "url": "url", "file": "file_id"}[source.type]
    value: str | None = getattr(source, name)
    if not value:
        raise InvalidInput(f"{place}.source.{name} is missing", param=f"{place}.source.{name}")
    if source.type != "base64":
        return value
    if source.media_type is None:
        where = f"{place}.source.media_type"
        raise InvalidInput(f"{where} is missing", param=where)
    return f"data:{source.media_type};base64,{value}"


def document_text(block: DocumentBlock, place: str) -> str:
    """A document's title, context and text."""
    if block.source.type != "text":
        raise NotSupported(
            f"{place}.source.type: {block.source.type[:64]!r} is not supported, only 'text' is",
            param=f"{place}.source.type",
        )
    return "\n".join(each for each in (block.title, block.context, block.source.data) if each)


def search_result_text(block: SearchResultBlock) -> str:
    """A search result's title, source and text."""
    return "\n".join([block.title, block.source, *(each.text for each in block.content)])
