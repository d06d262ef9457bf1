"""scripts/pin_images.py against a registry of this test."""

import hashlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from scripts.pin_images import FILES, Image, images, main, with_digests

TEXT = """
ARG BASE=python:3.11-slim
FROM ${BASE} AS base
    image: nats:2.12.12-alpine
    image: quay.io/team/tool:v1  # a comment
  images: [not:one]
"""


class Registry(BaseHTTPRequestHandler):
    """Answers with a digest of the path to clients that have fetched a token."""

    def do_GET(self) -> None:
        if self.path.startswith("/token"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"token": "t"}' if "scope=pull" in self.path else b"{}")
            return
        if self.headers["Authorization"] != "Bearer t":
            host = self.headers["Host"]
            self.send_response(401)
            self.send_header(
                "WWW-Authenticate", f'Bearer realm="http://{host}/token",service="r",scope="pull"'
            )
            self.end_headers()
            return
        is_missing = "missing" in self.path
        self.send_response(404 if is_missing else 200)
        assert "image.index" in self.headers["Accept"]
        self.send_header("Docker-Content-Digest", digest_of(self.path))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def digest_of(path: str) -> str:
    return f"sha256:{hashlib.sha256(path.encode()).hexdigest()}"


@pytest.fixture
def registry() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_digests_are_written_checked_and_removed(registry: str, tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(TEXT)
    assert main(["--check", "--registry", registry], [path]) == 1
    assert path.read_text() == TEXT
    assert main(["--registry", registry], [path]) == 0
    nats = digest_of("/v2/library/nats/manifests/2.12.12-alpine")
    assert f"image: nats:2.12.12-alpine@{nats}\n" in path.read_text()
    assert f"tool:v1@{digest_of('/v2/team/tool/manifests/v1')}  # a comment" in path.read_text()
    assert "[not:one]" in path.read_text()
    assert main(["--check", "--registry", registry], [path]) == 0
    assert main(["--remove"], [path]) == 0
    assert path.read_text() == TEXT


def test_nothing_is_written_where_one_image_is_not_found(
    registry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(f"{TEXT}    image: missing:1\n")
    before = path.read_text()
    assert main(["--registry", registry], [path]) == 2
    assert path.read_text() == before
    assert "404" in capsys.readouterr().err


def test_every_image_of_our_files_is_found() -> None:
    found = {str(each) for path in FILES for each in images(path.read_text("utf-8"))}
    names = {each.partition(":")[0] for each in found}
    assert {"python", "nats", "valkey/valkey", "grafana/grafana", "prom/prometheus"} <= names
    # What has a line `image:` and no tag would be left out.
    lines = [line for path in FILES for line in path.read_text("utf-8").splitlines()]
    tagged = [line for line in lines if line.strip().startswith("image: ")]
    assert len(tagged) == sum(len(images(line)) for line in tagged) > 6
    assert Image("nats", "1").address(None) == (
        "https://registry-1.docker.io/v2/library/nats/manifests/1"
    )
    assert with_digests("image: a:1\n", lambda _: "sha256:0") == "image: a:1@sha256:0\n"
