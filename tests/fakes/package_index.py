"""A package index on this machine, which serves what a test puts into it, or fails on request."""

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tokenmesh.shared.catalog import Wheel


def make_wheel(
    package: str, folder: str, files: Mapping[str, bytes], version: str = "1.0"
) -> tuple[Wheel, bytes]:
    """A wheel with these files of a model and those that every package has."""
    data = io.BytesIO()
    name = package.replace("-", "_")
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise RuntimeError")
        archive.writestr(f"{name}-{version}.dist-info/licenses/LICENSE", "free")
        for path, content in files.items():
            archive.writestr(f"{folder}/{path}", content)
    content = data.getvalue()
    sha256 = hashlib.sha256(content).hexdigest()
    return Wheel(package, version, sha256, len(content), folder), content


class FakeIndex:
    """The simple API over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, bytes] = {}
        self.hashes: dict[str, str] = {}
        """By file: what the listing says, which a test may make untrue."""
        self.yanked: dict[str, str] = {}
        self.is_html = False
        self.takes_ranges = True
        self.stops_after: dict[str, int] = {}
        """Where the first answer about a file ends."""
        self.statuses: dict[str, int] = {}
        """Statuses of files that are not served."""
        self.ranges: list[str | None] = []
        """From where on files were asked for."""

    def add(self, wheel: Wheel, content: bytes) -> Wheel:
        self.files[wheel.file_name] = content
        self.hashes[wheel.file_name] = wheel.sha256
        return wheel

    def listing(self, package: str) -> tuple[str, bytes] | None:
        """The type and the text of a package's page."""
        begin = package.replace("-", "_") + "-"
        entries: list[dict[str, Any]] = [
            {
                "filename": name,
                "url": f"../../files/{name}",
                "hashes": {"sha256": self.hashes[name]},
                "yanked": self.yanked.get(name, False),
            }
            for name in self.files
            if name.startswith(begin)
        ]
        if not entries:
            return None
        if not self.is_html:
            return "application/vnd.pypi.simple.v1+json", json.dumps({"files": entries}).encode()
        links = [
            f'<a href="{each["url"]}#sha256={each["hashes"]["sha256"]}"'
            + (f' data-yanked="{each["yanked"]}"' if each["yanked"] else "")
            + f">{each['filename']}</a>"
            for each in entries
        ]
        return "text/html", "\n".join(links).encode()


@contextmanager
def fake_index() -> Iterator[FakeIndex]:
    """Serve one at its `url` as long as the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, _, name = self.path.strip("/").partition("/")
            if kind == "simple":
                page = index.listing(name)
                self._answer(404, b"") if page is None else self._answer(200, page[1], page[0])
            elif name in index.statuses:
                self._answer(index.statuses[name], b"")
            else:
                self._send_file(name)

        def _send_file(self, name: str) -> None:
            asked = self.headers.get("Range") if index.takes_ranges else None
            index.ranges.append(asked)
            content = index.files[name]
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if start >= len(content):
                self._answer(416, b"")
                return
            status = 206 if asked else 200
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            stop = index.stops_after.pop(name, len(content))
            self.wfile.write(content[start:stop])

        def _answer(self, status: int, body: bytes, kind: str = "text/html") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index = FakeIndex(f"http://127.0.0.1:{server.server_port}/simple")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
