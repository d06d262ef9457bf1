"""A bus named by tls://: what is said to a NATS with TLS, and nothing to one without."""

import json
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import certificates
from tests.servers import Server, bus_settings_of
from tokenmesh.shared.bus.message_bus import connect
from tokenmesh.shared.config.mesh import BusSettings
from tokenmesh.shared.errors import BusLost


def settings_for(server: Server) -> BusSettings:
    url = f"tls://localhost:{server.port}"
    return bus_settings_of(server).model_copy(update={"url": url, "connect_deadline_s": 0.5})


def add_tls(server: Server, certificate: Path) -> None:
    server.stop()
    config, pem = Path(server.command[-1]), json.dumps(str(certificate))
    config.write_text(f"{config.read_text()}tls {{ cert_file: {pem}, key_file: {pem} }}\n")
    server.start()


async def test_tls(
    start_nats: Callable[[], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = tmp_path / "certificate.pem"
    certificate.write_text(certificates.FIRST)
    server = start_nats()
    add_tls(server, certificate)
    with pytest.raises(BusLost, match="certificate"):
        await connect(settings_for(server), "trusts no server here")
    monkeypatch.setenv(ssl.get_default_verify_paths().openssl_cafile_env, str(certificate))
    bus = await connect(settings_for(server), "who trusts it")
    await bus.flush()
    await bus.close()


async def test_a_password_is_not_sent_where_tls_is_required_and_missing(
    start_nats: Callable[[], Server],
) -> None:
    server = start_nats()
    with pytest.raises(BusLost, match="secure connection not available"):
        await connect(settings_for(server), "who wants TLS")
