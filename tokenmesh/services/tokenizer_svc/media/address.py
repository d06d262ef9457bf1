"""Which network addresses media may come from: public ones, checked after name resolution.

A name is resolved once and the connection goes to the very address that was checked: a second
resolution could answer something else (DNS rebinding).
"""

import asyncio
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

from tokenmesh.shared.errors import InvalidInput

_NAT64: Final = IPv6Network("64:ff9b::/96")
_IETF_USE: Final = IPv4Network("192.0.0.0/24")
"""Not public, though some Python versions say so of parts of it."""
_V4_COMPATIBLE: Final = IPv6Network("::/96")
_LOW_32_BITS: Final = 0xFFFFFFFF


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, whatever it is wrapped in."""
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


async def resolve_public(host: str, port: int, *, allow_private: bool) -> str:
    """An address of `host` to connect to. Raises InvalidInput unless every one of them is public.

    One private address among public ones is refused too: it is how rebinding looks.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidInput(f"the host {host!r} does not resolve") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses:
        raise InvalidInput(f"the host {host!r} does not resolve")
    if not allow_private and not all(is_public(address) for address in addresses):
        raise InvalidInput(f"the host {host!r} is not on the public internet")
    return addresses[0]


def _embedded_v4(ip: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that packets to `ip` end up at, where there is one."""
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip.sixtofour is not None:
        return ip.sixtofour
    if ip.teredo is not None:
        return ip.teredo[1]
    if ip in _NAT64 or ip in _V4_COMPATIBLE:
        return IPv4Address(int(ip) & _LOW_32_BITS)
    return None
