"""Resolver: the address of a host that media come from, on the public internet only.

A name is resolved once, and the connection goes to the address that was checked, since a second
resolution could differ (DNS rebinding).
"""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.fair_queue import FairSlots, Grant

_NAT64: Final = IPv6Network("64:ff9b::/96")
_IETF_USE: Final = IPv4Network("192.0.0.0/24")
"""Not public, although some Python versions report parts of it as public."""
_V4_COMPATIBLE: Final = IPv6Network("::/96")
_LOW_32_BITS: Final = 0xFFFFFFFF


def is_public(address: str) -> bool:
    """Return whether an address, or the IPv4 address in it, is on the public internet."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = _embedded_v4(ip)
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    elif ip in _IETF_USE:
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _embedded_v4(ip: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that packets to `ip` reach, if there is one."""
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip.sixtofour is not None:
        return ip.sixtofour
    if ip.teredo is not None:
        return ip.teredo[1]
    if ip in _NAT64 or ip in _V4_COMPATIBLE:
        return IPv4Address(int(ip) & _LOW_32_BITS)
    return None


class Resolver:
    """Looks names up in threads of its own; tenants take turns.

    A look-up cannot be cancelled and takes as long as the name's DNS server likes. Its slot is
    released when it ends, not when its request gave up, so that slow names of one tenant leave
    threads to the others.
    """

    def __init__(self, limits: MediaSettings) -> None:
        self._allow_private = limits.allow_private_addresses
        self._threads = ThreadPoolExecutor(
            limits.max_concurrent_fetches, thread_name_prefix="resolver"
        )
        self._slots = FairSlots(
            "hosts to be resolved",
            limits.max_concurrent_fetches,
            limits.fetch_queue,
            most_each=limits.max_fetches_per_tenant,
        )

    async def resolve(self, host: str, port: int, tenant: str) -> str:
        """An address of `host` to connect to. Raises InvalidInput unless all addresses are public.

        A private address among public ones is a sign of DNS rebinding.
        """
        try:
            found = await self._look_up(host, port, tenant)
        except (OSError, UnicodeError) as error:
            raise InvalidInput(f"the host {host!r} does not resolve") from error
        if not found:
            raise InvalidInput(f"the host {host!r} does not resolve")
        if not self._allow_private and not all(is_public(address) for address in found):
            raise InvalidInput(f"the host {host!r} is not on the public internet")
        return found[0]

    async def _look_up(self, host: str, port: int, tenant: str) -> list[str]:
        grant = await self._slots.take(tenant)
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.submit(partial(_addresses, host, port))
        except BaseException:
            self._slots.release(grant)
            raise
        future.add_done_callback(lambda _: self._release_soon(loop, grant))
        return await asyncio.wrap_future(future)

    def _release_soon(self, loop: asyncio.AbstractEventLoop, grant: Grant) -> None:
        with suppress(RuntimeError):
            # A closed loop raises it: nothing waits for the slot.
            loop.call_soon_threadsafe(self._slots.release, grant)

    def stop(self) -> None:
        """Start no further look-ups; those that run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]
