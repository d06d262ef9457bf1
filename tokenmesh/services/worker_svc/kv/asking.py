"""`ask`: what the exchange of KV asks of the engine, between two steps."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from tokenmesh.engine.core.engine import Engine
from tokenmesh.services.worker_svc.thread import Consult, EngineHost

_LONGEST_S: Final = 120.0
"""A step that takes longer ends the worker."""

_Result = TypeVar("_Result")


async def ask(host: EngineHost, work: Callable[[Engine], _Result]) -> _Result:
    """Return what `work` returns on the engine thread. Steps stay in flight. It is carried out even
    when the caller leaves. Raises Overloaded, and what `work` raises."""
    done: Future[_Result] = Future()
    host.submit(Consult(work, done))
    async with asyncio.timeout(_LONGEST_S):
        return await asyncio.shield(asyncio.wrap_future(done))
