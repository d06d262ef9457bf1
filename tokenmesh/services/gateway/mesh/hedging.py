"""Asking a second time before the first question has failed; the first answer counts.

A queue group hands a question to any process, also to one that stands still, or dies with it.
"""

import asyncio
from collections.abc import Callable, Coroutine

from tokenmesh.services.gateway.mesh.retry_policy import found_nobody
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages import Message

_Question = Coroutine[object, object, Message]
_Asked = asyncio.Task[Message]


async def first_answer(
    ask: Callable[[bool], _Question], *, patience_s: float, max_asks: int
) -> Message:
    """The first answer to `ask(is_again)`: asked anew after silence, each time twice as long.

    An error that a retry may mend counts only when no question is open any more. `max_asks` bounds
    the questions that somebody may be at work on: what found nobody is asked again soon, for an
    open one may have been lost with the bus.
    """
    asked: set[_Asked] = {asyncio.create_task(ask(False))}
    num_asked, pause_s = 1, patience_s
    try:
        while True:
            timeout_s = pause_s if num_asked < max_asks else None
            done, open_ = await asyncio.wait(
                asked, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if _is_final(task) or not open_:
                    return task.result()
                if found_nobody(task.exception()):
                    num_asked, pause_s = num_asked - 1, patience_s
            asked = set(open_)
            if not done:
                asked.add(asyncio.create_task(ask(True)))
                num_asked, pause_s = num_asked + 1, 2 * pause_s
    finally:
        for task in asked:
            task.cancel()


def _is_final(task: _Asked) -> bool:
    error = task.exception()
    return not (isinstance(error, TokenMeshError) and error.retryable)


async def first_outcome(ask: Callable[[], _Question], *, patience_s: float) -> Message:
    """The answer or the error that comes first, of one question or of two that overlap.

    For one process asked by name: what it read before it died is never answered, while a question
    that comes after finds that nobody listens.
    """
    asked = [asyncio.create_task(ask())]
    try:
        done, _ = await asyncio.wait(asked, timeout=patience_s)
        if not done:
            asked.append(asyncio.create_task(ask()))
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
