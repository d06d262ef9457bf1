"""Aborts: ends running generate requests by their ids, on all gateways."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus, Envelope, Subscription
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages import AbortRequests

_VLLM_PREFIX: Final = "generate-tokens-"
"""vLLM's prefix of response ids; ours are the client's own ids."""


class Abortable(Protocol):
    def abort(self) -> None:
        """End it with the tokens that it has."""


class Aborts:
    """The running requests of one gateway by tenant and id."""

    def __init__(self, bus: Bus, max_ids: int) -> None:
        self._bus = bus
        self._max_ids = max_ids
        self._running: dict[tuple[str, RequestId], list[Abortable]] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Listen for aborts that other gateways received."""
        self._subscription = await self._bus.subscribe(subjects.aborts(), self._receive)

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()

    @contextmanager
    def running(self, tenant: str, request_id: RequestId, request: Abortable) -> Iterator[None]:
        """Inside the block the request can be aborted."""
        key = (tenant, request_id)
        self._running.setdefault(key, []).append(request)
        try:
            yield
        finally:
            self._running[key].remove(request)
            if not self._running[key]:
                del self._running[key]

    async def abort(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Abort a tenant's requests on every gateway. Unknown ids are ignored."""
        ids = [RequestId(each.removeprefix(_VLLM_PREFIX)) for each in request_ids]
        await self._bus.publish(
            subjects.aborts(), AbortRequests(tenant=tenant, request_ids=list(dict.fromkeys(ids)))
        )

    async def _receive(self, envelope: Envelope) -> None:
        message = envelope.message
        if not isinstance(message, AbortRequests):
            raise ProtocolError(f"a {type(message).__name__} instead of AbortRequests")
        if len(message.request_ids) > self._max_ids:
            raise ProtocolError(f"{len(message.request_ids)} ids to abort")
        for request_id in message.request_ids:
            for request in tuple(self._running.get((message.tenant, request_id), ())):
                request.abort()
