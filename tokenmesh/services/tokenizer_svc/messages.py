"""Reads the JSON of a chat request: checks it, normalizes content parts and collects media.

Free-form fields of a message (tool calls, names, reasoning) are passed on for the templates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tokenmesh.services.tokenizer_svc.given_embeds import EmbedsPart, put_marks, read_part
from tokenmesh.services.tokenizer_svc.media.fetch import BLOB_SCHEME, DATA_SCHEME
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import FieldPath, InvalidInput, field_name
from tokenmesh.shared.messages.media import AUDIO, EMBEDS_PART, IMAGE, VIDEO
from tokenmesh.shared.messages.tokenize import ChatPrompt

_TEXT_FIELD_BY_TYPE: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_IMAGE_TYPES: Final = ("image_url", "input_image", "image")
_VIDEO_TYPES: Final = ("video_url", "input_video", "video")
_AUDIO_TYPES: Final = ("input_audio", "audio_url", "audio")
_RESERVED_VARIABLES: Final = (
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
)


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An item of a message, not fetched yet."""

    path: FieldPath
    """Where it is in the request."""
    url: str | None
    """A data, http(s) or blob URL, or an upload's id; None if only the uuid is given."""
    uuid: str | None = None
    kind: str = IMAGE


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A chat prompt for a rendering process, and its media."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None
    documents: list[JsonObject] | None
    variables: JsonObject
    media: list[MediaPart]
    """In the order of the parts."""
    embeds: Sequence[EmbedsPart] = ()
    """The same."""


def read_conversation(prompt: ChatPrompt, limits: TokenizerSettings) -> ChatInput:
    """Decode and check. Raises InvalidInput that names the field."""
    messages = _decode_list(prompt.messages_json, "messages", limits.max_messages)
    if not messages:
        raise InvalidInput("messages is empty: send at least one message", param="messages")
    if prompt.continue_final_message and prompt.add_generation_prompt:
        raise InvalidInput(
            "continue_final_message and add_generation_prompt cannot both be set: "
            "set add_generation_prompt to false",
            param="continue_final_message",
        )
    media: list[MediaPart] = []
    embeds: list[EmbedsPart] = []
    for index, message in enumerate(messages):
        _read_message(message, ("messages", index), media, embeds)
    _bound_parts(messages, limits.max_content_parts)
    tools = _decode_optional(prompt.tools_json, "tools", limits.max_tools)
    documents = _decode_optional(prompt.documents_json, "documents", limits.max_documents)
    variables = read_variables(prompt.template_kwargs_json)
    if embeds:
        put_marks(embeds, [messages, tools, documents, variables, prompt.chat_template])
    return ChatInput(messages, tools, documents, variables, media, embeds)


def _decode(data: bytes, name: str) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{name} is not JSON: {error}", param=name) from error


def _decode_list(data: bytes, name: str, limit: int) -> list[JsonObject]:
    values = _decode(data, name)
    if not isinstance(values, list):
        raise InvalidInput(f"{name} is not a list", param=name)
    if len(values) > limit:
        raise InvalidInput(
            f"{name} holds {len(values)} entries, at most {limit} (tokenizer.max_{name})",
            param=name,
        )
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            path = (name, index)
            raise InvalidInput(f"{field_name(path)} is not an object", param=name, path=path)
    return values


def _decode_optional(data: bytes | None, name: str, limit: int) -> list[JsonObject] | None:
    # An empty list becomes None: some templates test `if tools`, others `is not none`.
    return (_decode_list(data, name, limit) if data is not None else None) or None


def read_variables(data: bytes | None) -> JsonObject:
    """The variables of a template in a request. Raises InvalidInput."""
    values = _decode(data, "chat_template_kwargs") if data is not None else {}
    if not isinstance(values, dict):
        raise InvalidInput("chat_template_kwargs is not an object", param="chat_template_kwargs")
    for name in _RESERVED_VARIABLES:
        if name in values:
            raise InvalidInput(
                f"chat_template_kwargs cannot set {name}: use the request's field",
                param="chat_template_kwargs",
            )
    return values


def _read_message(
    message: JsonObject, path: FieldPath, media: list[MediaPart], embeds: list[EmbedsPart]
) -> None:
    """Normalize the message's content in place, and collect its media and tensors."""
    if not isinstance(message.get("role"), str):
        raise _invalid((*path, "role"), "is missing or not a string")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise _invalid((*path, "content"), "is neither a string nor a list of parts")
    message["content"] = [
        _read_part(part, (*path, "content", index), media, embeds)
        for index, part in enumerate(content)
    ]


def _read_part(
    part: object, path: FieldPath, media: list[MediaPart], embeds: list[EmbedsPart]
) -> JsonObject:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _invalid(path, "is neither a string nor an object")
    kind = part.get("type") or ("image_url" if "image_url" in part else "text")
    if not isinstance(kind, str):
        raise _invalid((*path, "type"), "is not a string")
    if field := _TEXT_FIELD_BY_TYPE.get(kind):
        text = part.get(field)
        if not isinstance(text, str):
            raise _invalid((*path, field), "is missing or not a string")
        return {"type": "text", "text": text}
    if kind == EMBEDS_PART:
        embeds.append(read_part(part, path))
        return embeds[-1].part
    if kind in _IMAGE_TYPES:
        media.append(_read_url(part, path, IMAGE, "image"))
        return {"type": IMAGE}
    if kind in _VIDEO_TYPES:
        media.append(_read_url(part, path, VIDEO, "video"))
        return {"type": VIDEO}
    if kind in _AUDIO_TYPES:
        media.append(_read_audio(part, path))
        return {"type": AUDIO}
    raise _invalid((*path, "type"), f"{kind!r} is not supported")


def _read_url(part: JsonObject, path: FieldPath, kind: str, noun: str) -> MediaPart:
    """A part that names its file by a URL, an upload or a uuid."""
    uuid, field = _uuid_of(part, path), f"{kind}_url"
    source = part.get(field) or part.get("file_id") or part.get(kind)
    if isinstance(source, dict):
        source = source.get("url") or source.get("file_id")
    if source is not None and not isinstance(source, str):
        raise _invalid((*path, field), "is not a URL")
    if not source and not uuid:
        raise _invalid(path, f"has no {noun}: {field} is missing")
    return MediaPart(path, source or None, uuid, kind)


def _read_audio(part: JsonObject, path: FieldPath) -> MediaPart:
    """A recording: its URL, or its file in base64 as `input_audio` has it."""
    uuid = _uuid_of(part, path)
    given = part.get("input_audio")
    if given is not None:
        return MediaPart(path, _audio_uri(given, (*path, "input_audio")), uuid, AUDIO)
    return _read_url(part, path, AUDIO, "recording")


def _audio_uri(given: object, path: FieldPath) -> str:
    data = given.get("data") if isinstance(given, dict) else None
    if not isinstance(data, str) or not data:
        raise _invalid((*path, "data"), "is missing or not a string")
    is_uri = data.startswith((BLOB_SCHEME, DATA_SCHEME))
    return data if is_uri else f"{DATA_SCHEME};base64,{data}"


def _uuid_of(part: JsonObject, path: FieldPath) -> str | None:
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise _invalid((*path, "uuid"), "is not a string")
    return uuid or None


def _bound_parts(messages: list[JsonObject], limit: int) -> None:
    counts = (
        len(content) for message in messages if isinstance(content := message.get("content"), list)
    )
    if (total := sum(counts)) > limit:
        raise InvalidInput(
            f"messages hold {total} content parts, at most {limit}",
            param="messages",
        )


def _invalid(path: FieldPath, problem: str) -> InvalidInput:
    return InvalidInput(f"{field_name(path)} {problem}", param="messages", path=path)
