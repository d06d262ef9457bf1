"""The error tree of the mesh. Each error has an HTTP status, a code and whether a retry may help.

* TokenMeshError                  500 internal_error
  x InvalidInput                  400 invalid_request_error    (the user's; names the field)
    - UnknownModel                404 model_not_found
    - NotFound                    404 not_found
    - PromptTooLong               400 context_length_exceeded
    - PayloadTooLarge             413 payload_too_large
    - Unauthorized                401 invalid_api_key
    - Forbidden                   403 forbidden
    - Conflict                    409 conflict
  x ConfigError                   500 config_error             (the operator's; no client sees it)
  x CheckpointError               500 checkpoint_error         (names the file or tensor)
  x Unavailable                   503 unavailable, retryable
    - Overloaded                  429 overloaded, retryable, with retry_after_s
    - NoResponders                503 no_responders, retryable
    - Draining                    503 draining, retryable
    - BusLost                     503 bus_lost, retryable
    - KvSourceFailed              503 kv_source_failed, retryable
  x Asleep                        503 asleep                   (until the model is woken)
  x DeadlineExceeded              504 deadline_exceeded, retryable
  x Cancelled                     499 cancelled
  x ProtocolError                 500 protocol_error           (bytes that no peer would send)

A `Failed` message is the same facts on the wire: `messages.failed.to_failed / from_failed`.
"""

import copy
import re
from typing import ClassVar, Final, Self

_MAX_MESSAGE: Final = 4096
_MAX_PARAM: Final = 256
"""Characters."""
_ADDRESS: Final = re.compile(r" (?:at|@) 0x[0-9A-Fa-f]{6,16}\b")
"""The address of an object in memory, as Python and FFmpeg print it: it would help an attacker."""

FieldPath = tuple[str | int, ...]
"""Where a field is in a request's body: names of fields and positions in lists."""


def field_name(path: FieldPath) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name


class TokenMeshError(Exception):
    """Base of every error that TokenMesh raises on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        # Both may contain text of a client; they are searched, copied and logged.
        message = _ADDRESS.sub("", message[:_MAX_MESSAGE])
        param = param and param[:_MAX_PARAM]
        super().__init__(message)
        self.message = message
        self.param = param
        """The field, flag or file at fault, where there is one."""
        self.retry_after_s = retry_after_s


class InvalidInput(TokenMeshError):
    """The request is wrong; the message says what would be right, `param` names the field."""

    status = 400
    code = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        path: FieldPath = (),
        retry_after_s: float | None = None,
    ) -> None:
        """`path`: the field at fault, where it lies within the field `param`."""
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.path = path or (tuple(param.split(".")) if param else ())

    def renamed(self, name: str) -> Self:
        """The same error about a field that the client calls `name`."""
        renamed = copy.copy(self)
        # A whole word: `logprobs` is not renamed in `top_logprobs`.
        own = rf"(?<!\w){re.escape(field_name(self.path))}(?!\w)"
        if self.path:
            renamed.message = re.sub(own, lambda _: name, self.message)[:_MAX_MESSAGE]
        renamed.args = (renamed.message,)
        renamed.param = self.param and name[:_MAX_PARAM]
        renamed.path = (name,)
        return renamed

    def within(self, prompt: FieldPath) -> Self:
        """The same error about one of several prompts, whose own errors name it by its root.

        What was found in `messages[0]` of that prompt is in `messages[3][0]` of the body.
        """
        if not prompt:
            return self
        found = copy.copy(self)
        if self.path[:1] == prompt[:1]:
            found.path = (*prompt, *self.path[1:])
            if len(self.path) > 1:
                found = self.renamed(field_name(found.path))
            if self.param == prompt[0]:
                found.param = field_name(prompt)
        if found.message == self.message:
            found.message = f"{field_name(prompt)}: {self.message}"[:_MAX_MESSAGE]
        return found


class UnknownModel(InvalidInput):
    """No live worker serves the model that the request names."""

    status = 404
    code = "model_not_found"


class NotFound(InvalidInput):
    """The object (trace, upload, response) does not exist or has expired."""

    status = 404
    code = "not_found"


class PromptTooLong(InvalidInput):
    """Prompt plus requested output do not fit the model's context length."""

    code = "context_length_exceeded"

    @classmethod
    def over(cls, limit: int, found: str, remedy: str, *, param: str) -> Self:
        """The wording that clients match. `found`: the sizes, `remedy`: what to reduce."""
        return cls(
            f"This model's maximum context length is {limit} tokens. However, {found}. "
            f"Please reduce {remedy}.",
            param=param,
        )


class PayloadTooLarge(InvalidInput):
    """A body, message or media item is over its configured size."""

    status = 413
    code = "payload_too_large"


class Unauthorized(InvalidInput):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class Forbidden(InvalidInput):
    """Not allowed for this client with any key."""

    status = 403
    code = "forbidden"


class Conflict(InvalidInput):
    """The command does not fit the current state, such as a second start of a profile."""

    status = 409
    code = "conflict"


class ConfigError(TokenMeshError):
    """A setting is wrong; the message names it and what would be right."""

    code = "config_error"


class CheckpointError(TokenMeshError):
    """A model directory is unusable; the message names the file or tensor."""

    code = "checkpoint_error"


class Unavailable(TokenMeshError):
    """No instance can serve the request now; a retry may succeed."""

    status = 503
    code = "unavailable"
    retryable = True


class Overloaded(Unavailable):
    """A queue is at its bound; `retry_after_s` estimates when it is not."""

    status = 429
    code = "overloaded"


class NoResponders(Unavailable):
    """NATS reports that nothing is subscribed to the subject."""

    code = "no_responders"


class Draining(Unavailable):
    """The service finishes what it has and takes nothing new."""

    code = "draining"


class BusLost(Unavailable):
    """The connection to NATS is down and the wait for it is over."""

    code = "bus_lost"


class KvSourceFailed(Unavailable):
    """KV that was on its way from another worker does not come."""

    code = "kv_source_failed"
    source: str = ""
    """That worker."""


class Asleep(TokenMeshError):
    """Every worker of the model sleeps. A retry does not help: the model must be woken."""

    status = 503
    code = "asleep"


class DeadlineExceeded(TokenMeshError):
    """The request's absolute deadline has passed."""

    status = 504
    code = "deadline_exceeded"
    retryable = True


class Cancelled(TokenMeshError):
    """The client left or cancelled; no answer is expected."""

    status = 499
    code = "cancelled"


class ProtocolError(TokenMeshError):
    """Bytes on the bus that do not decode, or a reply of the wrong type."""

    code = "protocol_error"
