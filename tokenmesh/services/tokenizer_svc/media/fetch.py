"""Fetcher: bytes behind an http(s) URL, within a size, a time and the public internet."""

import asyncio
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from tokenmesh.services.tokenizer_svc.media.address import resolve_public
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge
from tokenmesh.shared.fair_queue import FairSlots

_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PORT_BY_SCHEME: Final = {"http": 80, "https": 443}


class Fetcher:
    """Holds the connections; `stop` closes them."""

    def __init__(self, limits: MediaSettings) -> None:
        self._limits = limits
        self._slots = FairSlots(
            "media to be fetched",
            limits.max_concurrent_fetches,
            limits.fetch_queue,
            most_each=limits.max_fetches_per_tenant,
        )
        # Redirects are followed by hand, so that each target is checked; proxies from the
        # environment would connect to addresses that nobody checked. One client's cookies must
        # not travel with another's request, and a kept connection was verified for one host only.
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,
            timeout=limits.fetch_timeout_s,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"user-agent": "tokenmesh", "accept-encoding": "identity"},
        )

    async def stop(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def fetch(self, url: str, tenant: str) -> bytes:
        """The body. Raises InvalidInput, or PayloadTooLarge, that says why there is none.

        Tenants take turns, and none may have all slots: the time of one's slow URLs is not that of
        another's. Raises Overloaded when too many wait.
        """
        try:
            async with self._slots.slot(tenant), asyncio.timeout(self._limits.fetch_timeout_s):
                return await self._follow(url)
        except TimeoutError as error:
            raise InvalidInput(
                f"the URL took longer than {self._limits.fetch_timeout_s:g} s"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InvalidInput(f"the URL cannot be fetched: {type(error).__name__}") from error

    async def _follow(self, url: str) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            answer = await self._get(url)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise InvalidInput(f"the URL redirects more than {self._limits.max_redirects} times")

    async def _get(self, url: str) -> bytes | str:
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
            # The certificate must be the name's, not the address's.
            extensions={"sni_hostname": host},
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return str(response.headers["location"])
            return await self._read(response)
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

    async def _read(self, response: httpx.Response) -> bytes:
        if response.status_code != httpx.codes.OK:
            raise InvalidInput(f"the URL answers with status {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            # Compressed bodies could grow beyond any limit while they are unpacked.
            raise InvalidInput("the URL answers with a compressed body")
        limit = self._limits.max_bytes
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
