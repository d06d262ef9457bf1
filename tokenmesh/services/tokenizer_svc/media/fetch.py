"""Reads a media file: from a data URI, an upload, a gateway's blob, or an http(s) URL.

URLs must lead to the public internet. A name is resolved once, and the connection goes to the
address that was checked, since a second resolution could differ (DNS rebinding).
"""

import asyncio
import base64
import binascii
import socket
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput, NotFound, PayloadTooLarge
from tokenmesh.shared.fair_queue import FairSlots
from tokenmesh.shared.ids import BlobKey

_NAT64: Final = IPv6Network("64:ff9b::/96")
_IETF_USE: Final = IPv4Network("192.0.0.0/24")
"""Not public, although some Python versions report parts of it as public."""
_V4_COMPATIBLE: Final = IPv6Network("::/96")
_LOW_32_BITS: Final = 0xFFFFFFFF


def is_public(address: str) -> bool:
    """Whether an IP address, or the IPv4 address embedded in it, is on the public internet."""
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
    """An address of `host` to connect to. Raises InvalidInput unless all addresses are public.

    A private address among public ones is a sign of DNS rebinding.
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


_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PORT_BY_SCHEME: Final = {"http": 80, "https": 443}


class Fetcher:
    """Fetches URLs, within limits of size and time; `stop` closes the connections."""

    def __init__(self, limits: MediaSettings) -> None:
        self._limits = limits
        self._slots = FairSlots(
            "media to be fetched",
            limits.max_concurrent_fetches,
            limits.fetch_queue,
            most_each=limits.max_fetches_per_tenant,
        )
        # Redirects are followed in `_follow`, which checks each target. Proxies from the
        # environment would connect to unchecked addresses. Cookies must not be sent with another
        # client's request, and a kept connection was verified for one host only.
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,
            timeout=limits.fetch_timeout_s,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"user-agent": "tokenmesh", "accept-encoding": "identity"},
        )

    async def stop(self) -> None:
        await self._client.aclose()

    async def fetch(self, url: str, tenant: str, max_bytes: int | None = None) -> bytes:
        """The body, of at most `max_bytes` (default: the setting for images).

        Raises InvalidInput or PayloadTooLarge; Overloaded when too many wait.

        Tenants take turns, and none may use all slots, so that slow URLs of one do not delay the
        others.
        """
        try:
            async with self._slots.slot(tenant), asyncio.timeout(self._limits.fetch_timeout_s):
                return await self._follow(url, max_bytes or self._limits.max_bytes)
        except TimeoutError as error:
            raise InvalidInput(
                f"the URL took longer than {self._limits.fetch_timeout_s:g} s"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InvalidInput(f"the URL cannot be fetched: {type(error).__name__}") from error

    async def _follow(self, url: str, max_bytes: int) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            answer = await self._get(url, max_bytes)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise InvalidInput(f"the URL redirects more than {self._limits.max_redirects} times")

    async def _get(self, url: str, max_bytes: int) -> bytes | str:
        """The body, or the target of a redirect."""
        parts = self._check(url)
        host, port = parts.hostname or "", parts.port or _PORT_BY_SCHEME[parts.scheme]
        address = await resolve_public(
            host, port, allow_private=self._limits.allow_private_addresses
        )
        request = self._client.build_request(
            "GET",
            httpx.URL(url).copy_with(host=address, port=port, userinfo=b""),
            headers={"host": parts.netloc.rpartition("@")[2]},
            # The certificate is checked for the name, not for the address.
            extensions={"sni_hostname": host},
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return str(response.headers["location"])
            return await self._read(response, max_bytes)
        finally:
            await response.aclose()

    def _check(self, url: str) -> SplitResult:
        if len(url) > self._limits.max_url_chars:
            raise InvalidInput(f"the URL is longer than {self._limits.max_url_chars} characters")
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise InvalidInput(f"the URL is malformed: {error}") from error
        if parts.scheme not in _PORT_BY_SCHEME or not parts.hostname:
            raise InvalidInput("the URL is neither http, https nor data")
        allowed = self._limits.allowed_domains
        if allowed and parts.hostname not in {domain.lower() for domain in allowed}:
            raise InvalidInput(f"media from the host {parts.hostname!r} are not allowed")
        return parts

    async def _read(self, response: httpx.Response, limit: int) -> bytes:
        if response.status_code != httpx.codes.OK:
            raise InvalidInput(f"the URL returns status {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            # A compressed body could grow beyond any limit when it is decompressed.
            raise InvalidInput("the URL returns a compressed body")
        declared = response.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise PayloadTooLarge(f"the file has {declared} bytes, at most {limit}")
        chunks, num_bytes = [], 0
        async for chunk in response.aiter_raw():
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise PayloadTooLarge(f"the file has more than {limit} bytes")
            chunks.append(chunk)
        return b"".join(chunks)


DATA_SCHEME: Final = "data:"
BLOB_SCHEME: Final = "blob:"
"""The gateway replaces large data URIs by it, and refuses it from clients."""

UPLOAD_PREFIX: Final = "file-"


def upload_key(upload_id: str) -> BlobKey:
    """The key under which the gateway stores an uploaded file."""
    return BlobKey(f"tm:file:{upload_id}")


async def read_source(
    url: str, fetcher: Fetcher, blobs: Blobs, max_bytes: int, tenant: str
) -> bytes:
    """The bytes of a `url` that is not a data URI. Raises InvalidInput, NotFound or
    PayloadTooLarge."""
    if url.startswith(BLOB_SCHEME):
        return _bounded(await blobs.get(BlobKey(url.removeprefix(BLOB_SCHEME))), max_bytes)
    if url.startswith(UPLOAD_PREFIX):
        try:
            return _bounded(await blobs.get(upload_key(url)), max_bytes)
        except NotFound as error:
            raise NotFound(f"the upload {url!r} does not exist or has expired") from error
    return await fetcher.fetch(url, tenant, max_bytes)


def decode_data_uri(uri: str, max_bytes: int) -> bytes:
    """The bytes in a base64 data URI. Raises InvalidInput or PayloadTooLarge."""
    head, separator, body = uri.partition(",")
    if not separator or not head.endswith(";base64"):
        raise InvalidInput("the data URI is not of the form data:<type>;base64,...")
    # Four characters hold three bytes: this check needs no decoding.
    if len(body) // 4 * 3 > max_bytes + 3:
        raise PayloadTooLarge(f"the file has more than {max_bytes} bytes")
    try:
        return _bounded(base64.b64decode(body, validate=True), max_bytes)
    except binascii.Error as error:
        raise InvalidInput(f"the file is not base64: {error}") from error


def _bounded(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise PayloadTooLarge(f"the file has {len(data)} bytes, at most {max_bytes}")
    return data
