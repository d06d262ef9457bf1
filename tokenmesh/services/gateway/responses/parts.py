"""Content parts of input messages and tool outputs, as the chat takes them."""

from typing import Any, Final

from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.responses.reading import (
    get_objects,
    get_optional_string,
    get_string,
    one_of,
)
from tokenmesh.shared.errors import InvalidInput

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
_KNOWN: Final = ("input_text", "output_text", "refusal", "input_image")
_DETAILS: Final = ("low", "high", "auto", "original")

Content = str | list[dict[str, Any]]


def read_content(holder: dict[str, Any], name: str, place: str) -> Content:
    """A string, or parts; parts that are all text stay parts. Raises InvalidInput."""
    value = holder.get(name)
    if isinstance(value, str):
        return value
    if value is None:
        raise InvalidInput(f"{place}.{name} is missing", param=f"{place}.{name}")
    if not isinstance(value, list):
        where = f"{place}.{name}"
        raise InvalidInput(f"{where} must be a string or a list of parts", param=where)
    parts = get_objects(holder, name, place)
    return [_read_part(part, f"{place}.{name}[{index}]") for index, part in enumerate(parts)]


def read_text(holder: dict[str, Any], name: str, place: str) -> str:
    """Text only, its parts joined. Raises InvalidInput."""
    value = holder.get(name)
    if isinstance(value, str):
        return value
    parts = get_objects(holder, name, place)
    return "".join(
        _read_text_part(part, f"{place}.{name}[{index}]") for index, part in enumerate(parts)
    )


def _read_text_part(part: dict[str, Any], place: str) -> str:
    kind = one_of(part.get("type"), _TEXT_TYPES, f"{place}.type")
    return get_string(part, _FIELD_BY_TYPE[kind], place, is_empty_ok=True)


def _read_part(part: dict[str, Any], place: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXT_TYPES:
        return {"type": "text", "text": _read_text_part(part, place)}
    if kind == "input_file":
        raise NotSupported(f"{place}.type 'input_file' is not supported", param=f"{place}.type")
    if kind not in _MEDIA_TYPES:
        one_of(kind, _KNOWN, f"{place}.type")
    return _read_image(part, place) if kind == "input_image" else part


def _read_image(part: dict[str, Any], place: str) -> dict[str, Any]:
    if part.get("detail") is not None:
        one_of(part["detail"], _DETAILS, f"{place}.detail")
    url = get_optional_string(part, "image_url", place)
    source = url or get_optional_string(part, "file_id", place)
    uuid = get_optional_string(part, "uuid", place)
    if not source and not uuid:
        where = f"{place}.image_url"
        raise InvalidInput(f"{where} is missing: send it or file_id", param=where)
    image: dict[str, Any] = {"type": "image_url"}
    if source:
        image["image_url"] = {"url": source}
    return image | ({"uuid": uuid} if uuid else {})
