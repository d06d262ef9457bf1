"""Work of a request that takes more than a few milliseconds, away from the event loop.

One thread does it all: it and the loop take turns of a millisecond (`sys.setswitchinterval`), and
with more threads the loop would wait for each of them. It helps where the work is Python's, not
where one call into C keeps the interpreter's lock.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")

SWITCH_S: Final = 0.001
"""For `sys.setswitchinterval`."""

_thread: Final = ThreadPoolExecutor(1, "off-loop")


async def off_loop(
    is_long: bool, function: Callable[_Given, _Made], *args: _Given.args, **kwargs: _Given.kwargs
) -> _Made:
    """What the function makes: at once unless `is_long`. Who waits has a request open."""
    if not is_long:
        return function(*args, **kwargs)
    work = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_thread, work)
