"""Failed: an error that can be sent."""

from typing import Final

import msgspec

from tokenmesh.shared import errors


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """An error on the wire; the same facts as a `TokenMeshError`."""

    code: str
    message: str
    status: int = 500
    retryable: bool = False
    param: str | None = None
    retry_after_s: float | None = None
    path: errors.FieldPath = ()
    """The path of an InvalidInput's field, where `param` does not say the same."""
    source: str = ""
    """The worker that failed, where it is not the one that says so."""


def _subclasses(cls: type[errors.TokenMeshError]) -> list[type[errors.TokenMeshError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _subclasses(sub))]


_CLASS_BY_CODE: Final = {cls.code: cls for cls in _subclasses(errors.TokenMeshError)}


def to_failed(error: errors.TokenMeshError) -> Failed:
    """The message for an error."""
    return Failed(
        code=error.code,
        message=error.message,
        status=error.status,
        retryable=error.retryable,
        param=error.param,
        retry_after_s=error.retry_after_s,
        path=_path(error),
        source=error.source if isinstance(error, errors.KvSourceFailed) else "",
    )


def _path(error: errors.TokenMeshError) -> errors.FieldPath:
    if not isinstance(error, errors.InvalidInput) or errors.field_name(error.path) == error.param:
        return ()
    return error.path


def from_failed(failed: Failed) -> errors.TokenMeshError:
    """The error for a message; a code that this version does not know becomes its nearest base.

    So does one that may be retried although its kind as such may not.
    """
    cls = _CLASS_BY_CODE.get(failed.code)
    if cls is None or (failed.retryable and not cls.retryable):
        cls = errors.Unavailable if failed.retryable else errors.TokenMeshError
    error = cls(failed.message, param=failed.param, retry_after_s=failed.retry_after_s)
    if failed.path and isinstance(error, errors.InvalidInput):
        error.path = failed.path
    if isinstance(error, errors.KvSourceFailed):
        error.source = failed.source
    return error
