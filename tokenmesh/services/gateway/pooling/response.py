"""PoolingResponse: a request for numbers as an HTTP response.

A large answer is written in portions while it is sent: neither its text is held as a whole nor the
event loop.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.http.event_loop import off_loop
from tokenmesh.services.gateway.http.response_sender import ClientWatch, ResponseSender
from tokenmesh.services.gateway.pooling.job import PoolJob
from tokenmesh.services.gateway.pooling.run import PoolRun, PoolServices
from tokenmesh.shared.errors import Cancelled
from tokenmesh.shared.telemetry import REQUEST_ID, Tally

_PORTION_VALUES: Final = 32 * 1024
"""Numbers that are written at once."""
CHARS_PER_VALUE: Final = 8
"""Characters of text that are written in the time of one number."""
JSON_HEADERS: Final = ((b"content-type", b"application/json"),)


@dataclass(slots=True)
class NumbersBody:
    """A body in parts, which are made when they are sent."""

    parts: list[tuple[int, Callable[[], bytes]]] = field(default_factory=list)
    """The numbers that a part writes, and what makes its bytes."""
    headers: Sequence[tuple[bytes, bytes]] = JSON_HEADERS
    needs_numpy: bool = False
    """Whether the parts are made in a thread, however few numbers there are: numpy is imported when
    it is first needed."""

    def add(self, data: bytes) -> None:
        """Append bytes as they are."""
        self.parts.append((0, lambda: data))

    def add_rows(
        self, num_values: int, rows: Sequence[Callable[[], bytes]], between: bytes
    ) -> None:
        """Append rows of `num_values` numbers each."""
        for index, row in enumerate(rows):
            if index:
                self.add(between)
            self.parts.append((num_values, row))

    def portions(self) -> Iterator[list[Callable[[], bytes]]]:
        portion: list[Callable[[], bytes]] = []
        num_values = 0
        for size, part in self.parts:
            if portion and num_values + size > _PORTION_VALUES:
                yield portion
                portion, num_values = [], 0
            portion.append(part)
            num_values += size
        yield portion


Compute = Callable[[PoolRun, NumbersBody], Awaitable[object]]
"""Computes the numbers and fills the body; runs while the client is connected."""


class PoolingResponse(Response):
    """Runs a request for numbers when it is called."""

    def __init__(self, job: PoolJob, compute: Compute, services: PoolServices) -> None:
        super().__init__()
        self._job = job
        self._compute = compute
        self._services = services
        self._flushing = Tally("flush")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        run = PoolRun(self._services, self._job, context)
        try:
            async with ClientWatch(receive, self._services.settings.write_timeout_s) as watch:
                headers = partial(self._services.load_headers, context, self._job.card.name)
                sender = ResponseSender(send, watch, self._flushing, headers)
                with sender.until_draining():
                    await self._run(run, sender)
        except Cancelled:
            context.has_client_left = True
        finally:
            run.release()
            self._flushing.record({REQUEST_ID: self._job.request_id})

    async def _run(self, run: PoolRun, sender: ResponseSender) -> None:
        body = NumbersBody()
        failure: BaseException | None = None
        try:
            await self._compute(run, body)
        except BaseException as error:
            failure = error
            raise
        finally:
            run.finish(failure)
            # A traceback refers to this frame.
            failure = None
        num_values = sum(size for size, _ in body.parts)
        is_large = num_values > self._services.settings.inline_pool_values
        if is_large or body.headers is not JSON_HEADERS:
            await sender.send_parts(list(body.headers), _written(body))
        else:
            parts = [part for _, part in body.parts]
            await sender.answer(await off_loop(body.needs_numpy, _joined, parts))


async def _written(body: NumbersBody) -> AsyncIterator[bytes]:
    for portion in body.portions():
        yield await off_loop(True, _joined, portion)


def _joined(parts: Sequence[Callable[[], bytes]]) -> bytes:
    return b"".join([part() for part in parts])
