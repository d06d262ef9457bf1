"""Listener: the socket that a gateway accepts connections on."""

import socket
from contextlib import suppress
from pathlib import Path

from tokenmesh.shared.config.http import ListenerSettings
from tokenmesh.shared.errors import ConfigError


def listen(settings: ListenerSettings) -> socket.socket:
    """On the Unix socket or the port. Raises ConfigError that says what to change."""
    if settings.uds is not None:
        return _listen_unix(settings.uds, settings.backlog)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # named, since asyncio turns Nagle off for this protocol only, and not for 0
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((settings.host, settings.port))
        bound.listen(settings.backlog)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "choose another one with --host and --port",
            param="gateway.port",
        ) from error
    bound.setblocking(False)
    return bound


def forget(settings: ListenerSettings) -> None:
    """Remove what outlives the listener: the file of a Unix socket."""
    if settings.uds is not None:
        with suppress(OSError):
            settings.uds.unlink()


def _listen_unix(path: Path, backlog: int) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        bound.bind(str(path))
        # as nobody else could be told apart by an address: who may open the file may call
        path.chmod(0o660)
        bound.listen(backlog)
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {path}: {reason}", param="gateway.uds") from error
    bound.setblocking(False)
    return bound


def _remove_stale(path: Path) -> None:
    """A socket on which nobody listens any more is left from a process that was killed."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
