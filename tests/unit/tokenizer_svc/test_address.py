"""Only addresses of the public internet are connected to, whatever they are wrapped in."""

import socket

import pytest

from tokenmesh.services.tokenizer_svc.media.resolver import Resolver, is_public
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput

PRIVATE = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:c0a8:101::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "93.184.216.34",
    "172.32.0.1",
    "2606:4700:4700::1111",
    "2a00:1450:4001:81b::200e",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
]


async def resolve(host: str, *, allow_private: bool = False) -> str:
    resolver = Resolver(MediaSettings(allow_private_addresses=allow_private))
    try:
        return await resolver.resolve(host, 80, "a")
    finally:
        resolver.stop()


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "::1", "0"]
)
async def test_every_spelling_of_loopback_is_refused(host: str) -> None:
    with pytest.raises(InvalidInput, match=r"not on the public internet|does not resolve"):
        await resolve(host)


@pytest.mark.parametrize("host", ["x" * 64 + ".example", "a..b", "\udcff", ""])
async def test_names_that_cannot_exist_do_not_resolve(host: str) -> None:
    with pytest.raises(InvalidInput, match=r"does not resolve|not on the public"):
        await resolve(host)


async def test_one_private_address_among_public_ones_refuses_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [(0, 0, 0, "", ("8.8.8.8", 80)), (0, 0, 0, "", ("10.0.0.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    with pytest.raises(InvalidInput, match="not on the public internet"):
        await resolve("two-faced.example")
    assert await resolve("two-faced.example", allow_private=True) == "8.8.8.8"
