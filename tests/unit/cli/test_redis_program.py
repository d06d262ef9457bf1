"""`up` starts a Redis with the security fixes, the system's before the wheel's."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tokenmesh.cli.embedded.servers import find_redis, is_new_enough, parse_version
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.errors import ConfigError

LEAST = UpSettings().redis_least_versions


@pytest.mark.parametrize(
    ("shown", "is_accepted"),
    [
        ("Redis server v=6.2.14 sha=0:0 malloc=libc bits=64 build=d", False),
        ("Redis server v=6.2.20 sha=0:0 malloc=libc bits=64 build=d", True),
        ("Redis server v=7.0.15 sha=0:0 malloc=libc bits=64 build=d", False),
        ("Redis server v=7.4.5 sha=0:0 malloc=libc bits=64 build=d", False),
        ("Redis server v=8.2.1 sha=0:0 malloc=libc bits=64 build=d", False),
        ("Redis server v=8.2.3 sha=0:0 malloc=libc bits=64 build=d", True),
        ("Redis server v=8.10.0 sha=0:0 malloc=libc bits=64 build=d", True),
        ("Valkey server v=8.0.6 sha=0:0 malloc=libc bits=64 build=d", False),
        ("Valkey server v=8.1.6 sha=0:0 malloc=libc bits=64 build=d", True),
        ("Valkey server v=9.1.0 sha=0:0 malloc=libc bits=64 build=d", True),
        ("Valkey server v=7.0.99 sha=0:0 malloc=libc bits=64 build=d", False),
    ],
)
def test_each_release_line_has_its_own_least_version(shown: str, is_accepted: bool) -> None:
    version = parse_version(shown)
    assert version is not None
    assert is_new_enough(version, LEAST) == is_accepted


def test_a_product_without_a_least_version_is_not_taken() -> None:
    version = parse_version("Valkey server v=9.9.9")
    assert version is not None
    assert not is_new_enough(version, ("redis 8.2.2",))


def test_what_is_no_version_is_none() -> None:
    assert parse_version("KeyDB server v=6.3.4") is None
    assert parse_version("") is None


def program(folder: Path, name: str, shown: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{shown}'\n")
    path.chmod(0o755)
    return path


def test_the_systems_server_is_taken_when_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "valkey-server", "Valkey server v=8.0.0")
    system = program(tmp_path, "redis-server", "Redis server v=99.0.0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_redis(UpSettings()) == str(system)


def test_an_old_server_of_the_system_gives_way_to_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = program(tmp_path, "redis-server", "Redis server v=6.2.14")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_redis(UpSettings()) != str(old)


def test_without_a_server_that_is_new_enough_the_error_names_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = program(tmp_path, "redis-server", "Redis server v=6.2.14")
    broken = program(tmp_path, "valkey-server", "no version")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    limits = UpSettings(redis_least_versions=("redis 100.0.0",))
    with pytest.raises(ConfigError) as caught:
        find_redis(limits)
    for part in (f"{old} is redis 6.2.14", f"{broken} is unknown", "pip install", "--redis URL"):
        assert part in caught.value.message


def test_a_least_version_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError):
        UpSettings(redis_least_versions=("redis 8",))
