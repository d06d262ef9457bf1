"""Errors as OpenAI clients know them: {"error": {"message", "type", "param", "code"}}.

`type` is vLLM's word for the status, `code` our error's code.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import msgspec
from pydantic import ValidationError

from tokenmesh.shared.errors import FieldPath, InvalidInput, TokenMeshError, field_name

_TYPE_BY_STATUS: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "HeaderTooLargeError",
    499: "ClientClosedRequestError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

_MESSAGE_BY_TYPE: Final = {
    "list_type": "Input should be a valid array",
    "none_required": "Input should be null",
    **dict.fromkeys(("dict_type", "model_type"), "Input should be an object"),
}
"""Large bodies are validated as Python's objects, which have other names."""
_MAX_SHOWN: Final = 60
_MAX_SENTENCES: Final = 5


class NotSupported(InvalidInput):
    """A field or value that is known and that this version cannot serve."""

    code = "not_supported"
    kind: ClassVar[str] = ""
    """The error's `type` where it is not that of its status."""


class MissingField(InvalidInput):
    """A field that must be there."""


class UnknownField(InvalidInput):
    """A field that nothing knows."""


class WrongType(InvalidInput):
    """A value of another type than the field's."""


class UnsupportedMediaType(InvalidInput):
    """The body is not of the type that the route takes."""

    status = 415
    code = "unsupported_media_type"


class StatusError(TokenMeshError):
    """A status that has no error class, such as 405."""

    def __init__(self, message: str, *, status: int = 500, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status  # type: ignore[misc]  # of this error, not of a class
        self.code = code  # type: ignore[misc,assignment]


class ErrorFacts(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorFacts


def invalid(path: str, problem: str, kind: type[InvalidInput] = InvalidInput) -> InvalidInput:
    """An error about the field at `path`; its message is `path` and `problem`."""
    return kind(f"{path} {problem}", param=path)


def error_body(error: TokenMeshError) -> ErrorBody:
    body = status_body(error.status, error.message, error.code, error.param)
    if isinstance(error, NotSupported) and error.kind:
        body.error.type = error.kind
    return body


def write_error(error: TokenMeshError, _context: object) -> tuple[ErrorBody, int]:
    """The body of a response and its status."""
    return error_body(error), error.status


def status_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> ErrorBody:
    """The body for a status without an error class, such as 405."""
    kind = _TYPE_BY_STATUS.get(status, "InternalServerError")
    return ErrorBody(ErrorFacts(message=message, type=kind, param=param, code=code))


def invalid_fields(
    error: ValidationError, place: str = "", name_of: Callable[[FieldPath], str] = field_name
) -> InvalidInput:
    """Pydantic's errors as one sentence a field; `param` is the first field.

    `place` is the name of what was validated, if that was not the whole body; `name_of` names a
    field. For a field that may have several types only the errors of that one are shown that the
    client most likely meant.
    """
    root: FieldPath = (place,) if place else ()
    details = error.errors(include_url=False, include_context=False)
    depth_by_field: dict[str, int] = {}
    for detail in details:
        field, depth = _field(detail), len(field_path(detail["loc"]))
        depth_by_field[field] = max(depth, depth_by_field.get(field, 0))
    shown = _of_meant_types(
        [each for each in details if len(field_path(each["loc"])) == depth_by_field[_field(each)]]
    )
    names = [name_of((*root, *_path(each["loc"]))) for each in shown[:_MAX_SENTENCES]]
    sentences = dict.fromkeys(map(_sentence, shown[:_MAX_SENTENCES], names))
    path: FieldPath = (names[0],) if names[0] else ()
    kind = _kind_of(shown[0]["type"])
    return kind("; ".join(sentences), param=names[0] or None, path=path)


def _kind_of(detail_type: str) -> type[InvalidInput]:
    if detail_type == "missing":
        return MissingField
    if detail_type == "extra_forbidden":
        return UnknownField
    return WrongType if detail_type.endswith("_type") else InvalidInput


def _of_meant_types(details: list[Any]) -> list[Any]:
    """The errors without those of types that fit a value worse than another one does.

    A type fits best where the value of an item is wrong rather than its type, else where its first
    error comes last.
    """
    found: dict[FieldPath, dict[str | int, list[Any]]] = {}
    for detail in details:
        union, member = _union_of(detail["loc"])
        found.setdefault(union, {}).setdefault(member, []).append(detail)
    kept: list[Any] = []
    for members in found.values():
        best = max(map(_fit, members.values()))
        kept += [each for errors in members.values() if _fit(errors) == best for each in errors]
    return [each for each in details if each in kept]


def _fit(errors: list[Any]) -> tuple[bool, int]:
    """A higher one is of a type that the client more likely meant."""
    place = next((part for part in reversed(errors[0]["loc"]) if isinstance(part, int)), -1)
    return not any(each["type"].endswith("_type") for each in errors), place


def _union_of(location: Sequence[str | int]) -> tuple[FieldPath, str | int]:
    """The path of the first field that may have several types, and which of them; else "" twice."""
    path = _path(location)
    for index, part in enumerate(location):
        if index == len(path) or path[index] != part:
            return path[:index], part
    return path, ""


def _field(detail: Any) -> str:
    return str(detail["loc"][0]) if detail["loc"] else ""


def _sentence(detail: Any, name: str) -> str:
    message = _MESSAGE_BY_TYPE.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    if detail["type"] == "json_invalid":
        return f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}"
    if detail["type"] == "missing":
        return f"{name} is missing"
    where = f"{name}: " if name else ""
    shown, kind = _shown(detail["input"]), f"[type={detail['type']}]"
    if shown is None:
        return f"{where}{message} {kind}"
    return f"{where}{message} (got {shown}) {kind}"


def _shown(given: object) -> str | None:
    """The value as text; None if it is too long."""
    if isinstance(given, str) and len(given) > _MAX_SHOWN:
        return None
    if not isinstance(given, str | int | float | None) or (
        isinstance(given, int) and given.bit_length() > 64
    ):
        return None
    shown = repr(given)
    return shown if len(shown) <= _MAX_SHOWN else None


def field_path(location: Sequence[str | int]) -> str:
    """`messages[0].content`; the names of union members that pydantic adds are left out."""
    return field_name(_path(location))


def _path(location: Sequence[str | int]) -> FieldPath:
    path: list[str | int] = []
    for part in location:
        is_field = part not in _UNION_MEMBERS and (not path or str(part).isidentifier())
        if isinstance(part, int) or is_field:
            path.append(part)
    return tuple(path)


_UNION_MEMBERS: Final = frozenset(("str", "int", "float", "bool", "dict", "list", "none"))
