"""Reads a media file: from a data URI, an upload, a gateway's blob, or an http(s) URL.

URLs must lead to the public internet: the connection goes to an address that `Resolver` has
checked, for each redirect again.
"""

import asyncio
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpx

from tokenmesh.services.tokenizer_svc.media.resolver import Resolver
from tokenmesh.shared.base64_text import decode_base64
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput, NotFound, PayloadTooLarge
from tokenmesh.shared.fair_queue import FairSlots
from tokenmesh.shared.ids import BlobKey

MAX_URL_CHARS: Final = 8192
"""Length of an http(s) URL."""

_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PORT_BY_SCHEME: Final = {"http": 80, "https": 443}
_LAST_PORT: Final = 65535


class Fetcher:
    """Fetches URLs, within limits of size and time; `stop` closes the connections."""

    def __init__(self, limits: MediaSettings) -> None:
        self._limits = limits
        self._resolver = Resolver(limits)
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
        self._resolver.stop()
        await self._client.aclose()

    async def fetch(self, url: str, tenant: str, max_bytes: int | None = None) -> bytes:
        """The body, of at most `max_bytes` (default: the setting for images).

        Raises InvalidInput or PayloadTooLarge; Overloaded when too many wait.

        Tenants take turns, and none may use all slots, so that slow URLs of one do not delay the
        others.
        """
        try:
            async with self._slots.slot(tenant), asyncio.timeout(self._limits.fetch_timeout_s):
                return await self._follow(url, tenant, max_bytes or self._limits.max_bytes)
        except TimeoutError as error:
            raise InvalidInput(
                f"the URL took longer than {self._limits.fetch_timeout_s:g} s "
                "(tokenizer.media.fetch_timeout_s)"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            # httpx parses the target of a redirect too, although it does not follow it.
            raise InvalidInput(f"the URL cannot be fetched: {type(error).__name__}") from error

    async def _follow(self, url: str, tenant: str, max_bytes: int) -> bytes:
        target = self._checked(url)
        for _ in range(self._limits.max_redirects + 1):
            answer = await self._get(target, tenant, max_bytes)
            if isinstance(answer, bytes):
                return answer
            target = self._checked(answer, target)
        raise InvalidInput(f"the URL redirects more than {self._limits.max_redirects} times")

    async def _get(self, url: httpx.URL, tenant: str, max_bytes: int) -> bytes | str:
        """The body, or the target of a redirect."""
        # Of a name with other letters than ASCII, `raw_host` is the form that DNS knows.
        host, port = url.raw_host.decode("ascii"), url.port or _PORT_BY_SCHEME[url.scheme]
        address = await self._resolver.resolve(host, port, tenant)
        request = self._client.build_request(
            "GET",
            url.copy_with(host=address, port=port, userinfo=b""),
            headers={"host": url.netloc.decode("ascii")},
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

    def _checked(self, text: str, base: httpx.URL | None = None) -> httpx.URL:
        """The URL, relative to `base`. One parser reads it, so what is checked is what is used."""
        if len(text) > MAX_URL_CHARS:
            raise InvalidInput(f"the URL is longer than {MAX_URL_CHARS} characters")
        try:
            url = httpx.URL(text) if base is None else base.join(text)
            names = {url.host, url.raw_host.decode("ascii")}
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidInput(f"the URL is malformed: {error}") from error
        if not 0 <= (url.port or 0) <= _LAST_PORT:
            raise InvalidInput(f"the URL is malformed: port {url.port} is out of range")
        if url.scheme not in _PORT_BY_SCHEME or not url.host:
            raise InvalidInput("the URL is neither http, https nor data")
        allowed = {domain.lower() for domain in self._limits.allowed_domains}
        if allowed and allowed.isdisjoint(names):
            raise InvalidInput(f"media from the host {url.host!r} are not allowed")
        return url

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
        return _bounded(decode_base64(body), max_bytes)
    except ValueError as error:
        raise InvalidInput(f"the file is not base64: {error}") from error


def _bounded(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise PayloadTooLarge(f"the file has {len(data)} bytes, at most {max_bytes}")
    return data
