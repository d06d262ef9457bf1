"""keeps_cancellation: around libraries that may swallow one, retry, and go on as if nothing was."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keeps_cancellation() -> Iterator[None]:
    """Raises CancelledError after a block in which its task was cancelled, whatever came of it."""
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        yield
    except Exception as error:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > num_before:
        raise asyncio.CancelledError
