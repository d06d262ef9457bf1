"""Inbox: what the streams of one HTTP response brought and the response has not yet taken.

One wake-up serves all that has arrived since the last: a client that reads slowly gets fewer,
larger frames. Past the bound the response ends with an error, so memory stays bounded too.
"""

import asyncio
from collections.abc import Callable, Iterable

from tokenmesh.services.gateway.mesh.session import Output
from tokenmesh.shared.errors import Overloaded, TokenMeshError


class Inbox:
    """Outputs of several choices in order of arrival. One reader."""

    __slots__ = (
        "_closers",
        "_error",
        "_max_tokens",
        "_num_tokens",
        "_outputs",
        "_reader",
        "_waiter",
    )

    def __init__(self, max_tokens: int, reader: str = "the client") -> None:
        """`reader`: what is to blame when it is more than `max_tokens` behind."""
        self._reader = reader
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._outputs: list[tuple[int, Output]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: TokenMeshError | None = None
        self._closers: dict[int, Callable[[], None]] = {}

    def connect(self, choice: int, close: Callable[[], None]) -> None:
        """Say how a choice's stream is closed."""
        self._closers[choice] = close

    def close(self, choice: int) -> None:
        """A choice needs no more: its worker should stop."""
        self._closers.pop(choice)()

    def put(self, choice: int, output: Output) -> None:
        """Add what a choice's stream brought."""
        if output.error is not None:
            self.fail(output.error)
            return
        self._outputs.append((choice, output))
        self._num_tokens += len(output.token_ids)
        if self._num_tokens > self._max_tokens:
            self.fail(Overloaded(f"{self._reader} is more than {self._max_tokens} tokens behind"))
        self._wake()

    def complete(self, outputs: Iterable[tuple[int, Output]]) -> None:
        """Add whole answers; nobody can be behind with what comes all at once."""
        self._outputs.extend(outputs)
        self._wake()

    def fail(self, error: TokenMeshError) -> None:
        """The response cannot be completed; what is already here is dropped."""
        if self._error is None:
            self._error = error
        self._wake()

    async def get(self) -> list[tuple[int, Output]]:
        """Everything that is here, at least one output. Raises what `fail` was given."""
        if not self._outputs and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        outputs, self._outputs, self._num_tokens = self._outputs, [], 0
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
