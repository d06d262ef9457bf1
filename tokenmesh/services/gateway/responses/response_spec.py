"""ResponseSpec: a response that is to be made, as it was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.tenancy.lease import Lease
from tokenmesh.shared.ids import ResponseId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSpec:
    """The same for whoever carries it out."""

    id: ResponseId
    body: ResponsesRequest
    body_json: bytes
    created_s: float
    deadline_s: float
    exchange: RequestContext
    lease: Lease | None = None
    """Given back when it is made; None for one that was admitted elsewhere."""
    previous: Sequence[dict[str, Any]] = field(default=())
    """Items of the responses before this one."""
    seed: int | None = None
    """Known once somebody has begun."""

    @property
    def is_background(self) -> bool:
        """Whether it is made apart from any client's connection."""
        return bool(self.body.background)
