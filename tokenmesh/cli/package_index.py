"""The package index that pip is configured for: where a file is, and its bytes.

It speaks the simple repository API (PEP 503, 592, 691) itself because pip forgets what it has of a
file when it is interrupted, and does not say in a form that programs read why it failed.
"""

import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx

from tokenmesh.cli.package_listing import Listed, from_html, from_json
from tokenmesh.cli.pip_config import pip_config
from tokenmesh.shared.catalog import Wheel
from tokenmesh.shared.errors import ConfigError

_PYPI: Final = "https://pypi.org/simple"
_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_JSON: Final = "application/vnd.pypi.simple.v1+json"
_TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
_MAX_LISTING_BYTES: Final = 32 << 20
_CHUNK_BYTES: Final = 1 << 20


class Interrupted(Exception):
    """The connection ended before the file did; what has arrived can be kept."""


class PackageIndex:
    """The indexes of this machine's pip; close it by leaving `opened`."""

    def __init__(self, urls: tuple[str, ...], client: httpx.Client) -> None:
        self._urls = urls
        self._client = client

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator["PackageIndex"]:
        """Raises ConfigError where pip is configured to use no index."""
        config = pip_config()
        if config.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            raise ConfigError("pip is configured to use no package index (no-index)")
        urls = [config.get("index-url", _PYPI), *config.get("extra-index-url", "").split()]
        verify: Any = True
        if cert := config.get("cert"):
            verify = ssl.create_default_context(cafile=Path(cert).expanduser())
        with httpx.Client(
            verify=verify,
            proxy=config.get("proxy") or None,
            timeout=_TIMEOUT,
            follow_redirects=True,
        ) as client:
            yield cls(tuple(urls), client)

    def find(self, wheel: Wheel) -> Listed:
        """Where a file is. Raises ConfigError: no index has it, or none answers."""
        wrong_hash, problems, has_package = "", [], False
        for url in self._urls:
            page = f"{url.rstrip('/')}/{wheel.package}/"
            try:
                files = self._list(page)
            except (httpx.HTTPError, OSError, ValueError) as error:
                problems.append(f"{_shown(page)}: {_reason(error)}")
                continue
            has_package = has_package or files is not None
            found = (files or {}).get(wheel.file_name)
            if found is None:
                continue
            if found.sha256 in ("", wheel.sha256):
                return found
            wrong_hash = wrong_hash or found.sha256
        what = f"{wheel.package} {wheel.version}"
        if wrong_hash:
            raise ConfigError(
                f"the package index offers another file as {what} than the one that is known: its "
                f"SHA-256 is {wrong_hash}, expected {wheel.sha256}. Nothing was downloaded"
            )
        if problems:
            raise ConfigError(f"the package index does not answer: {'; '.join(problems)}")
        where = " or ".join(_shown(url) for url in self._urls)
        if has_package:
            raise ConfigError(f"the package index no longer has version {what}: {where}")
        raise ConfigError(f"the package index has no package {wheel.package}: {where}")

    def read(self, url: str, start: int) -> Iterator[bytes]:
        """The bytes of a file from `start` on.

        Raises Interrupted when the connection ends early, ConfigError for an answer that is none.
        """
        if url.startswith("file:"):
            yield from _read_file(url, start)
            return
        headers = {"Range": f"bytes={start}-"} if start else {}
        headers["Accept-Encoding"] = "identity"
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return
                if response.is_client_error:
                    raise ConfigError(f"{_shown(url)} answers {response.status_code}")
                if response.is_error:
                    raise Interrupted(f"{_shown(url)} answers {response.status_code}")
                skip = start if response.status_code != httpx.codes.PARTIAL_CONTENT else 0
                for chunk in response.iter_raw(_CHUNK_BYTES):
                    yield chunk[skip:]
                    skip = max(0, skip - len(chunk))
        except httpx.HTTPError as error:
            raise Interrupted(_reason(error)) from error

    def _list(self, page: str) -> Mapping[str, Listed] | None:
        """The files of a package by name; None: the index does not have the package."""
        if page.startswith("file:"):
            index = _path_of(page) / "index.html"
            return from_html(index.read_text("utf-8"), page) if index.is_file() else None
        with self._client.stream("GET", page, headers={"Accept": _ACCEPT}) as response:
            if response.status_code in (httpx.codes.NOT_FOUND, httpx.codes.GONE):
                return None
            response.raise_for_status()
            body = b""
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > _MAX_LISTING_BYTES:
                    raise ValueError("its list of files is too long")
            base = str(response.url)
            if response.headers.get("Content-Type", "").startswith(_JSON):
                return from_json(body, base)
            return from_html(body.decode("utf-8", "replace"), base)


def _read_file(url: str, start: int) -> Iterator[bytes]:
    try:
        with _path_of(url).open("rb") as file:
            file.seek(start)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise Interrupted(_reason(error)) from error


def _path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _shown(url: str) -> str:
    """Without the password that the URL of an index may hold."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answers {error.response.status_code}"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return _shown_in(text)


def _shown_in(text: str) -> str:
    return re.sub(r"://[^/\s@]+@", "://", text)
