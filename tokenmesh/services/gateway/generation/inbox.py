"""Inbox: what the streams of one HTTP response brought and the response has not yet read.

One wake-up serves everything that has arrived since the last one: a slow client gets fewer, larger
frames. Past its bound the response ends with an error, so memory stays bounded too.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tokenmesh.shared.errors import Overloaded, TokenMeshError
from tokenmesh.shared.messages.tokens import FinishReason, TokenLogprobs


@dataclass(slots=True)
class Output:
    """The new part of a message of tokens, for one stream."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: TokenMeshError | None = None
    """Set when the stream failed."""
    alignment: list[int] | None = None
    """See `Delta.alignment`."""


class Inbox:
    """Outputs of several choices in order of arrival, for one reader."""

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
        """`reader` is named in the error when more than `max_tokens` tokens are unread."""
        self._reader = reader
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._outputs: list[tuple[int, Output]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: TokenMeshError | None = None
        self._closers: dict[int, Callable[[], None]] = {}

    def connect(self, choice: int, close: Callable[[], None]) -> None:
        """Register the function that closes a choice's stream."""
        self._closers[choice] = close

    def close(self, choice: int) -> None:
        """Close the stream of a choice that needs no more tokens."""
        self._closers.pop(choice)()

    def put(self, choice: int, output: Output) -> None:
        """Add an output of a choice's stream."""
        if output.error is not None:
            self.fail(output.error)
            return
        self._outputs.append((choice, output))
        self._num_tokens += len(output.token_ids)
        if self._num_tokens > self._max_tokens:
            self.fail(Overloaded(f"{self._reader} is more than {self._max_tokens} tokens behind"))
        self._wake()

    def complete(self, outputs: Iterable[tuple[int, Output]]) -> None:
        """Add complete choices. The bound does not apply: they arrive all at once."""
        self._outputs.extend(outputs)
        self._wake()

    def fail(self, error: TokenMeshError) -> None:
        """End the response with an error; unread outputs are dropped."""
        if self._error is None:
            self._error = error
        self._wake()

    async def get(self) -> list[tuple[int, Output]]:
        """Wait for at least one output and return all. Raises the error given to `fail`."""
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
