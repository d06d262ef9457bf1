"""A service's event loop logs exceptions that no code has handled."""

import asyncio
import gc
import socket
from contextlib import suppress

import pytest
import uvloop

from tokenmesh.shared.service.run import log_unhandled

UNKNOWN = "no-such-service"
"""A port that is looked up and not found without DNS."""


async def _give_up_while_looking_up() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_unhandled)
    connecting = asyncio.create_task(
        loop.create_connection(asyncio.Protocol, "127.0.0.1", UNKNOWN)  # type: ignore[call-overload]
    )
    await asyncio.sleep(0)
    connecting.cancel()
    with suppress(asyncio.CancelledError):
        await connecting
    for _ in range(8):  # as many as look-ups at a time
        with pytest.raises(socket.gaierror):
            await loop.getaddrinfo("127.0.0.1", UNKNOWN)
    gc.collect()


async def _fail_alone() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_unhandled)
    loop.create_future().set_exception(RuntimeError("a fault of ours"))
    gc.collect()
    await asyncio.sleep(0)


def test_a_lookup_that_outlives_its_connection_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    uvloop.run(_give_up_while_looking_up())
    assert "never retrieved" not in caplog.text


def test_every_other_exception_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    uvloop.run(_fail_alone())
    assert "a fault of ours" in caplog.text
