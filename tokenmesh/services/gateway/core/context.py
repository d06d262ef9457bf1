"""RequestContext: what is known of one HTTP request and its response."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from starlette.requests import HTTPConnection
from starlette.types import Scope

from tokenmesh.services.gateway.core.http.body_budget import Body
from tokenmesh.services.gateway.core.http.errors import write_error
from tokenmesh.services.gateway.core.tenancy.tenant import (
    DEFAULT_ACCESS,
    Access,
    Lease,
    RateLimitStatus,
)
from tokenmesh.shared.errors import InvalidInput, TokenMeshError
from tokenmesh.shared.ids import RequestId

MAX_REQUEST_ID_CHARS: Final = 128
"""Length of an X-Request-Id or request_id."""

_KEY: Final = "tokenmesh.context"

ErrorWriter = Callable[[TokenMeshError, "RequestContext"], tuple[Any, int]]
"""The body of a refused request's response in the format of one API, and its status."""


@dataclass(slots=True)
class RequestContext:
    """Created by the edge, completed by the route."""

    request_id: RequestId
    """Returned as X-Request-Id; a body's `request_id` may replace it."""
    is_own_id: bool
    """It tells whether the client chose it."""
    started_s: float
    """Monotonic."""
    access: Access = DEFAULT_ACCESS
    """The tenant and the rights of the client's key."""
    method: str = ""
    path: str = ""
    kind: str = ""
    """It holds what ids of its answer begin with, such as `chatcmpl`."""
    write_error: ErrorWriter = write_error
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    """Those of the request; of several with one name the last."""
    standing: RateLimitStatus | None = None
    """The tenant's rate limits, once they are known."""
    lease: Lease | None = None
    """It holds what the request counts for in its tenant's limits while it runs."""
    body: Body | None = None
    """The body, where the route counts against limits."""
    warnings: list[str] = field(default_factory=list)
    """Returned as X-TokenMesh-Warning."""
    route: str = "other"
    model: str | None = None
    asked_model: str | None = None
    """The model's name in the request."""
    has_large_body: bool = False
    """It tells whether reading the body further takes more than a few milliseconds."""
    session_id: str | None = None
    """The client's name for related requests; an attribute of the trace."""
    status: int = 0
    response_bytes: int = 0
    """This is the size of the body, sent so far."""
    input_tokens: int = 0
    """It counts the tokens of all prompts that were answered; this and the next three are
    attributes of the trace."""
    output_tokens: int = 0
    max_tokens: int = 0
    """The most output tokens that a prompt could have."""
    finish_reasons: list[str] = field(default_factory=list)
    has_client_left: bool = False
    rename_error: Callable[[TokenMeshError], TokenMeshError] | None = None
    """Gives an error the field names of the client's API, where the request was translated."""

    @property
    def answer_id(self) -> str:
        """The id, with the kind before one that the client chose, as vLLM has it."""
        if not self.kind:  # of a line of a batch, whose id is ours
            return self.request_id
        is_marked = self.request_id.startswith((f"{self.kind}-", f"{self.kind}_"))
        return self.request_id if is_marked else f"{self.kind}-{self.request_id}"

    async def widen(self, requests: int, sequences: int) -> None:
        """Count as that many requests and sequences. Raises Overloaded or InvalidInput."""
        if self.lease is not None:
            await self.lease.widen(requests, sequences)

    def take_lease(self) -> Lease | None:
        """Take the lease for work that outlives the request; the caller releases it."""
        lease, self.lease = self.lease, None
        return lease

    def hand_on(self) -> None:
        """The body is no longer needed: its prompts are tokenized, or the request has ended."""
        if self.body is not None:
            self.body.hand_on()

    def release(self) -> None:
        """The request has ended."""
        if (lease := self.take_lease()) is not None:
            lease.release()


def attach(scope: Scope, context: RequestContext) -> None:
    """Store the context where `context_of` finds it."""
    scope[_KEY] = context


def find_context(scope: Scope) -> RequestContext | None:
    """None for a request that was refused before it had one."""
    return cast("RequestContext | None", scope.get(_KEY))


def context_of(scope: Scope) -> RequestContext:
    """The context of a request that passed the edge."""
    return cast("RequestContext", scope[_KEY])


def access_of(connection: HTTPConnection) -> Access:
    """The rights of a request's key."""
    return context_of(connection.scope).access


def check_request_id(text: str, field: str) -> None:
    """Check that an id can be returned in a header. Raises InvalidInput that names the field."""
    limit = MAX_REQUEST_ID_CHARS
    if len(text) > limit or not (text.isascii() and text.isprintable() and text):
        raise InvalidInput(f"{field} must be 1 to {limit} printable ASCII characters", param=field)
