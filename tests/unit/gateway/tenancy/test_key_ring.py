"""Keys of a key file, and of one that changes."""

import hashlib
from pathlib import Path

import pytest

from tokenmesh.services.gateway.core.tenancy.auth import KeyRing
from tokenmesh.services.gateway.core.tenancy.ledger import month_of, seconds_left
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import ConfigError, Unauthorized
from tokenmesh.shared.metrics import Metrics


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


GOOD = f"""
[tenants.acme]
priority = -1
weight = 2.5
requests_per_minute = 60
monthly_tokens = 1000

[tenants.ops]
admin = true

[[keys]]
sha256 = "{hashed("sk-acme").upper()}"
tenant = "acme"
note = "CI"

[[keys]]
sha256 = "{hashed("sk-ops")}"
tenant = "ops"
"""

WRONG = {
    "[tenants.acme": "it is not TOML",
    f'[[keys]]\nsha256 = "{hashed("x")}"\ntenant = "absent"': "keys[0].tenant",
    '[tenants.a]\n[[keys]]\nsha256 = "sk-in-clear"\ntenant = "a"': "keys[0].sha256",
    "[tenants.a]\nweight = 0": "weight",
    "[tenants.a]\nrequests_per_minute = 0": "requests_per_minute",
    '[tenants."a b"]': "tenants",
    "[tenants.a]\ncolour = 1": "colour",
    f'[tenants.a]\n[[keys]]\nsha256="{hashed("x")}"\ntenant="a"\n'
    f'[[keys]]\nsha256="{hashed("x")}"\ntenant="a"': "listed twice",
    "x = " + "[" * 5000: "it is not TOML",
    "\x00": "it is not TOML",
}


def ring(path: Path, *keys: str, **settings: int) -> tuple[KeyRing, Metrics]:
    metrics = Metrics()
    hashes = tuple(hashed(key) for key in keys)
    limits = GatewaySettings(keys_file=path, api_key_hashes=hashes, **settings)  # type: ignore[arg-type]
    return KeyRing(limits, metrics), metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(GOOD)
    return path


def test_a_key_has_the_rights_of_its_tenant(path: Path) -> None:
    keys, _ = ring(path, "sk-plain")
    acme = keys.access("/v1/models", "sk-acme")
    assert (acme.tenant.name, acme.tenant.priority, acme.tenant.weight) == ("acme", -1, 2.5)
    assert not acme.is_admin
    assert acme.tenant.has_limits
    assert keys.access("/v1/models", "sk-ops").is_admin
    assert not keys.access("/v1/models", "sk-ops").tenant.has_limits
    plain = keys.access("/v1/models", "sk-plain")
    assert (plain.tenant.name, plain.is_admin) == ("default", False)
    assert set(keys.tenants) == {"default", "acme", "ops"}
    assert keys.tenant("gone").name == "gone"


def test_keys_of_the_command_line_are_admin_keys_unless_a_file_says_otherwise(path: Path) -> None:
    alone = KeyRing(GatewaySettings(api_key_hashes=(hashed("sk-plain"),)), Metrics())
    assert alone.access("/metrics", "sk-plain").is_admin
    path.write_text("[tenants.default]\nadmin = true")
    keys, _ = ring(path, "sk-plain")
    assert keys.access("/metrics", "sk-plain").is_admin
    path.write_text("[tenants.default]\nadmin = false ")
    keys.reload_if_changed()
    assert not keys.access("/metrics", "sk-plain").is_admin


@pytest.mark.parametrize("key", [None, "", "sk-other", hashed("sk-acme")])
def test_with_a_file_every_request_needs_a_key(path: Path, key: str | None) -> None:
    keys, _ = ring(path)
    with pytest.raises(Unauthorized):
        keys.access("/v1/models", key)
    assert keys.access("/health", key).tenant.name == "default"


@pytest.mark.parametrize("text", WRONG)
def test_a_file_with_errors_is_refused_without_showing_a_key(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be used") as refused:
        ring(path)
    assert WRONG[text] in refused.value.message
    assert "sk-in-clear" not in refused.value.message


def test_a_file_that_is_too_large_or_missing_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than 10 bytes"):
        ring(path, max_keys_file_bytes=10)
    with pytest.raises(ConfigError, match="No such file"):
        ring(path.with_name("none.toml"))


def test_keys_of_the_command_line_belong_to_the_tenant_default(path: Path) -> None:
    path.write_text("[tenants.default]\nmax_concurrent = 3")
    keys, _ = ring(path, "sk-plain")
    assert keys.access("/v1/models", "sk-plain").tenant.max_concurrent == 3


def test_a_changed_file_is_loaded_and_one_with_errors_leaves_the_old_keys_in_force(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, metrics = ring(path)
    path.write_text(GOOD.replace(hashed("sk-acme").upper(), hashed("sk-new")))
    keys.reload_if_changed()
    assert keys.access("/v1/models", "sk-new").tenant.name == "acme"
    with pytest.raises(Unauthorized):
        keys.access("/v1/models", "sk-acme")
    path.write_text("[tenants.acme")
    for _ in range(3):
        keys.reload_if_changed()
    path.unlink()
    for _ in range(3):
        keys.reload_if_changed()
    assert keys.access("/v1/models", "sk-new").tenant.name == "acme"
    assert sum("stay in force" in record.message for record in caplog.records) == 2
    assert metrics.counter("key_file_reloads", outcome="refused")._value.get() == 2
    assert metrics.counter("key_file_reloads", outcome="loaded")._value.get() == 1


def test_months_are_of_the_calendar() -> None:
    last_second = 1_796_083_199.0  # 2026-11-30 23:59:59 UTC
    assert (month_of(last_second), month_of(last_second + 1)) == ("2026-11", "2026-12")
    assert seconds_left(last_second) == 1
    assert seconds_left(last_second + 1) == 31 * 86400
