"""Actor: the base class of everything that answers messages, and the mark on its handlers."""

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import msgspec

from tokenmesh.shared.actor.context import Context
from tokenmesh.shared.actor.supervisor import Supervisor
from tokenmesh.shared.messages import Message, Tokens

_Self = TypeVar("_Self", bound="Actor")
_Taken = TypeVar("_Taken", bound=msgspec.Struct)
_Answer = TypeVar("_Answer", bound="Message | None")
_Method = Callable[[_Self, _Taken, Context], Coroutine[object, object, _Answer]]

# Which message a handler takes is checked by `handles`; the table cannot say it per key.
Handler = Callable[[Any, Any, Context], Coroutine[object, object, "Message | None"]]

_MARK = "__handles__"


def handles(
    message_type: type[_Taken],
) -> Callable[[_Method[_Self, _Taken, _Answer]], _Method[_Self, _Taken, _Answer]]:
    """Mark a method as the handler of one message type.

    It returns the answer, or None: then a caller that waits is told `Done`. It raises a
    TokenMeshError to answer Failed.
    """

    def mark(
        method: _Method[_Self, _Taken, _Answer],
    ) -> _Method[_Self, _Taken, _Answer]:
        setattr(method, _MARK, message_type)
        return method

    return mark


class Actor:
    """Subclass it and mark handlers. The runtime sets `supervisor` before `start`."""

    handlers: ClassVar[dict[type[Message | Tokens], Handler]] = {}
    supervisor: Supervisor

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {
            getattr(method, _MARK): method
            for method in vars(cls).values()
            if hasattr(method, _MARK)
        }
        cls.handlers = {**cls.handlers, **own}

    async def start(self) -> None:
        """Called once, before the first message."""

    async def stop(self) -> None:
        """Called once, after the last message; background tasks are still running."""

    def spawn(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        name: str,
        *,
        is_fatal: bool = False,
    ) -> None:
        """Run `work()` beside the handlers until it returns or the actor stops.

        When it crashes it is called again after a pause; with `is_fatal` the service ends instead.
        """
        self.supervisor.spawn(work, name, is_fatal=is_fatal)
