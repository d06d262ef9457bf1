"""Web pages that call a gateway without keys: origins and host names."""

from pathlib import Path
from typing import Any

import pytest

from tokenmesh.services.gateway.core.http.middleware import check_page
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Forbidden

HERE = {b"host": b"127.0.0.1:8000"}
FOREIGN = {**HERE, b"origin": b"https://evil.example"}


def may(method: str, headers: dict[bytes, bytes], **settings: Any) -> bool:
    try:
        check_page(method, headers, GatewaySettings(**settings))
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", ""])
def test_a_page_of_another_origin_changes_nothing(method: str) -> None:
    assert not may(method, FOREIGN)
    assert not may(method, {**HERE, b"origin": b"null"})
    assert not may(method, {**HERE, b"origin": b"http://[::bad"})
    assert may(method, {**HERE, b"origin": b"http://127.0.0.1:8000"})
    assert may(method, HERE)
    assert may(method, FOREIGN, cors_origins=("https://evil.example",))
    assert may(method, FOREIGN, cors_origins=("*",))


def test_methods_without_effects_accept_any_origin() -> None:
    for method in ("GET", "HEAD", "OPTIONS"):
        assert may(method, FOREIGN)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "EVIL.example.", "a.b]"]
)
def test_a_public_host_name_is_refused_on_loopback(host: str) -> None:
    headers = {b"host": host.encode()}
    for method in ("GET", "POST", ""):
        assert not may(method, headers)
        assert not may(method, headers, host="127.0.0.53")
    assert may("GET", headers, host="0.0.0.0")
    assert may("GET", headers, uds=Path("/tmp/socket"))
    assert may("GET", headers, allowed_hosts=("*",))
    assert may("GET", headers, allowed_hosts=("evil.example", "127.0.0.1.evil.example", "a.b]"))


@pytest.mark.parametrize(
    "host",
    ["localhost:8000", "127.0.0.1", "[::1]:8000", "a.localhost", "gateway", "", "my.local:80"],
)
def test_local_names_and_addresses_are_accepted(host: str) -> None:
    assert may("GET", {b"host": host.encode()})
