"""Who waits for which answer: one inbox for a whole process, one token for each question."""

from collections.abc import Callable
from itertools import count
from typing import Final, Generic, TypeVar

from tokenmesh.shared.errors import Overloaded

AnswerT = TypeVar("AnswerT")


class Answers(Generic[AnswerT]):
    """Open questions by token. An answer to a question that was closed is dropped.

    A question's sink takes each answer, or None when the server says that nobody listens.
    """

    def __init__(self, prefix: str, limit: int) -> None:
        self._prefix: Final = prefix + "."
        self._limit: Final = limit
        self._sink_by_token: dict[str, Callable[[AnswerT | None], None]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._sink_by_token)

    @property
    def subject(self) -> str:
        """The wildcard that covers every token."""
        return self._prefix + "*"

    def open(self, sink: Callable[[AnswerT | None], None]) -> str:
        """The reply subject of a new question. Raises Overloaded at the limit."""
        if len(self._sink_by_token) >= self._limit:
            raise Overloaded(f"{self._limit} requests of this process already wait for an answer")
        token = str(next(self._numbers))
        self._sink_by_token[token] = sink
        return self._prefix + token

    def close(self, reply_to: str) -> None:
        """Forget a question."""
        self._sink_by_token.pop(reply_to[len(self._prefix) :], None)

    def deliver(self, reply_to: str, answer: AnswerT | None) -> bool:
        """Hand an answer to whoever asked; False when nobody asks any more."""
        sink = self._sink_by_token.get(reply_to[len(self._prefix) :])
        if sink is not None:
            sink(answer)
        return sink is not None
