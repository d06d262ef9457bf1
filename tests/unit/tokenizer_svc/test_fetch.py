"""URLs are fetched within a size, a time and the hosts that are allowed."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from tests.fakes.image_server import ImageServer, image_server
from tokenmesh.services.tokenizer_svc.media.fetch import Fetcher
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

LIMITS = MediaSettings(
    allow_private_addresses=True, max_bytes=1000, fetch_timeout_s=2.0, max_redirects=2
)


@pytest.fixture
async def server() -> AsyncIterator[ImageServer]:
    async with image_server() as server:
        yield server


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(LIMITS)
    yield fetcher
    await fetcher.stop()


async def refusal(url: str, **changes: object) -> str:
    """The error of fetching `url` under changed limits."""
    fetcher = Fetcher(LIMITS.model_copy(update=changes))
    try:
        with pytest.raises(InvalidInput) as refused:
            await fetcher.fetch(url, "a")
        return refused.value.message
    finally:
        await fetcher.stop()


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Every name has these addresses; returns a list of the names that were looked up."""
    names: list[str] = []

    def look_up(host: str, port: int, **_: object) -> list[object]:
        names.append(host)
        return [(0, 0, 0, "", (each, port)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return names


async def test_a_body_is_fetched(server: ImageServer, fetcher: Fetcher) -> None:
    url = server.serve("/a?b=c%20d", b"body")
    assert await fetcher.fetch(url, "a") == b"body"
    assert server.hits == ["/a?b=c%20d"]
    assert server.hosts == [f"127.0.0.1:{server.port}"]


async def test_the_host_is_named_and_the_checked_address_connected_to(
    server: ImageServer, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, "127.0.0.1")
    server.serve("/a", b"body")
    # Only our own resolution knows this name: a second one would fail.
    url = f"http://user:pass@images.example:{server.port}/a"
    assert await fetcher.fetch(url, "a") == b"body"
    assert server.hosts == [f"images.example:{server.port}"]


async def test_cookies_are_not_sent_with_later_requests(
    server: ImageServer, fetcher: Fetcher
) -> None:
    server.answers["/a"] = b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n"
    for _ in range(2):
        await fetcher.fetch(server.url("/a"), "a")
    assert len(server.heads) == 2
    assert not any("cookie" in head.lower() for head in server.heads)


async def test_private_addresses_are_refused_unless_allowed(server: ImageServer) -> None:
    url = server.serve("/a", b"body")
    for host in (
        *("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "[::1]", "[::ffff:7f00:1]"),
        *("2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "127.1", "0", "0.0.0.0"),
        *("169.254.169.254", "10.0.0.1", "[fe80::1]", "[fd00::1]", "[64:ff9b::7f00:1]"),
        *("[2002:7f00:1::]", "100.64.0.1", "224.0.0.1", "[::]", "localhost."),
    ):
        message = await refusal(url.replace("127.0.0.1", host), allow_private_addresses=False)
        reasons = ("not on the public internet", "does not resolve", "is malformed")
        assert any(reason in message for reason in reasons), (host, message)
    assert server.hits == []


async def test_a_name_of_a_public_and_a_private_address_is_refused(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve_to(monkeypatch, "93.184.215.14", "127.0.0.1")
    url = server.serve("/a", b"secret").replace("127.0.0.1", "rebinding.example")
    assert "not on the public internet" in await refusal(url, allow_private_addresses=False)
    # a name that answers otherwise the next time is not resolved again
    assert resolved == ["rebinding.example"]
    assert server.hits == []


async def test_a_redirect_to_a_private_address_is_refused(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, "127.0.0.1")
    # The first hop counts as public, so that only the second one can be what is refused.
    monkeypatch.setattr(
        "tokenmesh.services.tokenizer_svc.media.resolver.is_public",
        lambda address: server.hits == [],
    )
    server.redirect("/a", server.url("/secret"))
    server.serve("/secret", b"secret")
    message = await refusal(server.url("/a", "public.example"), allow_private_addresses=False)
    assert "'127.0.0.1' is not on the public internet" in message
    assert server.hits == ["/a"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed_relative_ones_too(
    status: int, server: ImageServer, fetcher: Fetcher
) -> None:
    server.redirect("/a", "b", status)
    server.redirect("/b", server.url("/c"), status)
    server.serve("/c", b"body")
    assert await fetcher.fetch(server.url("/a"), "a") == b"body"


async def test_redirects_end(server: ImageServer) -> None:
    url = server.redirect("/a", "/a")
    assert "more than 2 times" in await refusal(url)
    assert server.hits == ["/a"] * 3


async def test_a_redirect_leaves_http_for_nothing_else(server: ImageServer) -> None:
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/x", "data:image/png;base64,AA=="):
        url = server.redirect("/a", target)
        message = await refusal(url)
        assert "neither http, https nor data" in message or "InvalidURL" in message
    assert set(server.hits) == {"/a"}


async def test_a_size_over_the_limit_is_refused_before_the_body(server: ImageServer) -> None:
    url = server.url("/big")
    server.answers["/big"] = b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n"
    fetcher = Fetcher(LIMITS)
    with pytest.raises(PayloadTooLarge, match="1001 bytes, at most 1000"):
        await fetcher.fetch(url, "a")
    await fetcher.stop()


async def test_a_body_that_never_ends_is_cut_off(server: ImageServer, fetcher: Fetcher) -> None:
    with pytest.raises(PayloadTooLarge, match="more than 1000 bytes"):
        await fetcher.fetch(server.url("/endless"), "a")


@pytest.mark.parametrize("path", ["/slow", "/trickle"])
async def test_a_slow_server_is_given_up(path: str, server: ImageServer) -> None:
    assert "longer than 0.1 s" in await refusal(server.url(path), fetch_timeout_s=0.1)


async def test_waiting_for_a_slot_does_not_count_as_time(server: ImageServer) -> None:
    changes = {"max_concurrent_fetches": 1, "fetch_timeout_s": 0.5}
    fetcher = Fetcher(LIMITS.model_copy(update=changes))
    slow = [asyncio.create_task(fetcher.fetch(server.url("/slow"), "b")) for _ in range(3)]
    await asyncio.sleep(0)
    assert await fetcher.fetch(server.serve("/a", b"body"), "a") == b"body"
    # It was its turn after the first of the other tenant's.
    assert not slow[2].done()
    results = await asyncio.gather(*slow, return_exceptions=True)
    assert [type(each) for each in results] == [InvalidInput] * 3
    await fetcher.stop()


async def test_slow_hosts_of_a_tenant_leave_slots_to_others(server: ImageServer) -> None:
    changes = {"max_concurrent_fetches": 4, "max_fetches_per_tenant": 2, "fetch_timeout_s": 5.0}
    fetcher = Fetcher(LIMITS.model_copy(update=changes))
    slow = [asyncio.create_task(fetcher.fetch(server.url("/slow"), "b")) for _ in range(8)]
    await asyncio.sleep(0)
    assert await fetcher.fetch(server.serve("/a", b"body"), "a") == b"body"
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await fetcher.stop()


async def test_slow_names_of_a_tenant_leave_threads_to_others(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def look_up(host: str, port: int, **_: object) -> list[object]:
        if host == "slow.example":
            answered.wait(20)
        return [(0, 0, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    changes = {"max_concurrent_fetches": 40, "max_fetches_per_tenant": 32, "fetch_timeout_s": 1.0}
    fetcher = Fetcher(LIMITS.model_copy(update=changes))
    try:
        # The second round begins when the first has timed out, while its threads still wait.
        for _ in range(2):
            slow = (fetcher.fetch(server.url("/a", "slow.example"), "b") for _ in range(32))
            results = await asyncio.gather(*slow, return_exceptions=True)
            assert [type(each) for each in results] == [InvalidInput] * 32
        assert await fetcher.fetch(server.serve("/a", b"body"), "a") == b"body"
        # A name that was answered late has given its slot back.
        answered.set()
        assert await fetcher.fetch(server.url("/a", "slow.example"), "b") == b"body"
    finally:
        answered.set()
        await fetcher.stop()


async def test_a_host_with_other_letters_than_ascii_is_asked_for_as_dns_knows_it(
    server: ImageServer, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = resolve_to(monkeypatch, "127.0.0.1")
    server.serve("/a", b"body")
    assert await fetcher.fetch(server.url("/a", "b\u00fccher.example"), "a") == b"body"
    server.redirect("/b", server.url("/a", "b\u00fccher.example"))
    assert await fetcher.fetch(server.url("/b"), "a") == b"body"
    ascii_name = "xn--bcher-kva.example"
    assert names == [ascii_name, "127.0.0.1", ascii_name]
    assert server.hosts[0] == f"{ascii_name}:{server.port}"
    allowed = ("b\u00fccher.example",)
    limited = Fetcher(LIMITS.model_copy(update={"allowed_domains": allowed}))
    assert await limited.fetch(server.url("/a", "b\u00fccher.example"), "a") == b"body"
    await limited.stop()


@pytest.mark.parametrize(
    "target", ["http://[", "//[", "http://127.0.0.1:x/", "http://127.0.0.1:-1/", "http://xn--a--/"]
)
async def test_a_redirect_to_a_malformed_url_is_refused(target: str, server: ImageServer) -> None:
    message = await refusal(server.redirect("/a", target))
    reasons = ("malformed", "does not resolve", "cannot be fetched")
    assert any(reason in message for reason in reasons), message


async def test_compressed_bodies_are_refused(server: ImageServer) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nxx"
    server.answers["/a"] = head
    assert "compressed" in await refusal(server.url("/a"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", "status 500"),
        (b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n", "status 302"),
        (b"garbage\r\n\r\n", "cannot be fetched: RemoteProtocolError"),
        (b"", "cannot be fetched: RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", "cannot be fetched"),
    ],
)
async def test_a_failing_server_is_named(answer: bytes, message: str, server: ImageServer) -> None:
    server.answers["/a"] = answer
    assert message in await refusal(server.url("/a"))


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "gopher://127.0.0.1/",
        "http://",
        "//127.0.0.1/",
        "http://127.0.0.1:99999/",
        "http://[::1/",
        "http://127.0.0.1/\x00",
        "http://127.0.0.1/\ud800",
        "http://\ud800/",
        "http://xn--a--/",
        "http://127\u30020\u30020\u30021:1/",
        "http://exa mple/",
        "nothing",
        "",
        "http://127.0.0.1/" + "x" * 9000,
    ],
)
async def test_invalid_urls_are_refused(url: str) -> None:
    assert await refusal(url)


async def test_hosts_can_be_limited(server: ImageServer) -> None:
    url = server.serve("/a", b"body")
    assert "are not allowed" in await refusal(url, allowed_domains=("images.example",))
    fetcher = Fetcher(LIMITS.model_copy(update={"allowed_domains": ("127.0.0.1",)}))
    assert await fetcher.fetch(url, "a") == b"body"
    await fetcher.stop()
