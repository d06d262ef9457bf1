"""Ports on this machine: which are free, and which answer."""

import asyncio
import socket
from typing import Final

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
_SEARCHED: Final = 100
_RETRY_S: Final = 0.01


def free_port() -> int:
    """A loopback port that is free right now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_free(host: str, port: int, *, is_shared: bool = False) -> None:
    """Raises ConfigError with a free port to take instead, or the reason why `host` is wrong.

    `is_shared`: gateways that share their port may be there already.
    """
    error = _bind_error(host, port, is_shared=is_shared)
    if error is None:
        return
    others = range(port + 1, min(port + _SEARCHED, 65536))
    free = next((each for each in others if _bind_error(host, each) is None), None)
    if free is None:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", param="--host")
    raise ConfigError(
        f"port {port} on {host} is in use: {error}. Choose another one: --port {free}",
        param="--port",
    )


async def wait_accepting(port: int, timeout_s: float) -> bool:
    """Return whether the loopback port accepts connections before the time is over."""
    give_up_s = monotonic_s() + timeout_s
    while monotonic_s() < give_up_s:
        try:
            _, writer = await asyncio.open_connection(LOOPBACK, port)
        except OSError:
            await asyncio.sleep(_RETRY_S)
        else:
            writer.close()
            return True
    return False


def _bind_error(host: str, port: int, *, is_shared: bool = False) -> str | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            # As servers do: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None
