"""Attackers of the HTTP side: bodies from the document, odd heads, connections left half open."""

import asyncio
import json
import re
import uuid
from collections import Counter, defaultdict, deque
from random import Random
from typing import Any, Final
from urllib.parse import quote

from benchmarks.fuzz_run.mutate import mutate, spoil
from benchmarks.fuzz_run.schema import BodyMaker, Operation
from tokenmesh.cli.bench.client import Target

_ANSWER_S: Final = 30.0
_PATIENCE_S: Final = (0.0, 0.1, 1.0)
"""After it the client leaves, as clients do; a stream may run on until then."""
_METHODS: Final = ("CONNECT", "TRACE", "OPTIONS", "PUT", "PATCH", "HEAD", "PROPFIND", "BREW", "PRI")
_HEADS: Final = (
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAA\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Transfer-Encoding: gzip, chunked\r\nContent-Length: 5\r\n",
    "Content-Length: 5\r\nContent-Length: 6\r\n",
    "Content-Length: -1\r\n",
    "Expect: 100-continue\r\nContent-Length: 100000000\r\n",
    "X-Request-Id: " + "a" * 5000 + "\r\n",
    "Content-Type: multipart/form-data; boundary=" + "-" * 300 + "\r\nContent-Length: 0\r\n",
    "".join(f"X-{index}: {index}\r\n" for index in range(500)),
    "Range: bytes=0-\r\nIf-None-Match: *\r\nAccept: " + "a/b," * 1000 + "\r\n",
)
SKIPPED: Final = ("/sleep", "/wake_up", "/drain", "/start_profile", "/stop_profile")
"""An operator's key may do this to a mesh: it is not an attack."""
_OF_OPERATORS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_ID: Final = re.compile(rb'"id": ?"([a-z]+)([_-][A-Za-z0-9_-]{8,60})"')
_KIND_BY_PARAMETER: Final = {
    "file_id": "file",
    "batch_id": "batch",
    "conversation_id": "conv",
    "item_id": "msg",
    "response_id": "resp",
}
_KEPT_IDS: Final = 16
"""The ids of each kind that are kept; later requests name them."""
_KEPT_BYTES: Final = 64 * 1024
"""The part of an answer in which ids are looked for."""
_LINE: Final = (
    b'{"custom_id":"%d","method":"POST","url":"/v1/completions",'
    b'"body":{"model":"%s","prompt":"a","max_tokens":2}}\n'
)


class HttpFuzzer:
    """Sends; counts answers by status, and keeps what should not have been answered that way."""

    def __init__(
        self,
        server: Target,
        admin: Target,
        operations: list[Operation],
        maker: BodyMaker,
        random: Random,
        max_body_bytes: int,
    ) -> None:
        """`admin`: the same server with an operator's key, for routes that others may not use."""
        self._server = server
        self._admin = admin
        self._operations = [
            each for each in operations if not any(part in each.path for part in SKIPPED)
        ]
        self._maker = maker
        self._random = random
        self._max_body_bytes = max_body_bytes
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._ids: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT_IDS))

    async def run(self) -> None:
        """One request after the other, until cancelled."""
        while True:
            await self.send_one()

    async def send_one(self) -> None:
        """One connection with one request."""
        if self._random.random() < 0.1:
            request, name = self._odd_head(), "odd head"
        else:
            operation = self._random.choice(self._operations)
            request, name = self._request(operation), f"{operation.method} {operation.path}"
        status = await self._answer(request)
        self.answers[status] += 1
        if status in ("500", "502", "503", "504", "no answer"):
            self.wrong.append(f"{status} to {name}: {request[:600]!r}")

    async def _answer(self, request: bytes) -> str:
        """The status; "left" where this client did not wait for the end of an answer."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        except (TimeoutError, OSError):
            return "no answer"
        try:
            async with asyncio.timeout(_ANSWER_S):
                writer.write(request)
                line = await self._status_line(reader)
            async with asyncio.timeout(self._random.choice(_PATIENCE_S)):
                await self._read_rest(reader)
        except TimeoutError:
            return line if "line" in locals() else self._silence(request)
        except OSError:
            return "closed"
        finally:
            writer.transport.abort()
        return line or "closed"

    async def _read_rest(self, reader: asyncio.StreamReader) -> None:
        """Read to the end; ids in the beginning are kept."""
        kept = b""
        while part := await reader.read(65536):
            if len(kept) < _KEPT_BYTES:
                kept += part
                for kind, rest in _ID.findall(part):
                    self._ids[kind.decode()].append((kind + rest).decode())

    async def _status_line(self, reader: asyncio.StreamReader) -> str:
        line = await reader.readline()
        return line[9:12].decode("latin-1") if line.startswith(b"HTTP/1.1 ") else ""

    def _silence(self, request: bytes) -> str:
        """A request that is not complete is allowed to stay without an answer."""
        head, _, body = request.partition(b"\r\n\r\n")
        has_all = f"\r\nContent-Length: {len(body)}\r\n".encode() in head + b"\r\n"
        return "no answer" if has_all else "incomplete"

    def _odd_head(self) -> bytes:
        random = self._random
        path = random.choice(("/", "*", "a:80", "/v1/models", "/v1/" + "%" * 300, "/v1/files?x=1"))
        method = random.choice((*_METHODS, "GET", "POST"))
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\n{random.choice(_HEADS)}\r\n".encode()
        return spoil(head, random) if random.random() < 0.3 else head

    def _request(self, operation: Operation) -> bytes:
        random = self._random
        path, content_type, data = operation.path, operation.content_type, b""
        while "{" in path:
            before, _, after = path.partition("{")
            parameter, _, after = after.partition("}")
            path = before + quote(self._name(parameter), safe="") + after
        if random.random() < 0.1:
            path += "?" + "&".join(f"stream={'x' * 20}" for _ in range(random.choice((1, 300))))
        if "json" in content_type:
            data = self._json(operation)
        elif "multipart" in content_type:
            content_type += "; boundary=cut"
            data = self._multipart()
        if random.random() < 0.1:
            data = spoil(data, random)
        server = self._admin if operation.path in _OF_OPERATORS else self._server
        head = f"{operation.method} {path} HTTP/1.1\r\n{server.headers}"
        if content_type:
            head += f"Content-Type: {content_type}\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode("latin-1") + data

    def _name(self, parameter: str) -> str:
        """An id that an answer had, or one that does not exist."""
        known = self._ids[_KIND_BY_PARAMETER.get(parameter, "")]
        if known and self._random.random() < 0.5:
            return self._random.choice(known)
        return self._random.choice(("resp_" + uuid.uuid4().hex, "file-x", "a" * 3000, "../../etc"))

    def _json(self, operation: Operation) -> bytes:
        body = self._maker.make(operation.schema)
        if isinstance(body, dict) and "input_file_id" in body and self._ids["file"]:
            body["input_file_id"] = self._random.choice(self._ids["file"])
        if self._random.random() < 0.85:
            body = mutate(body, self._random, self._max_body_bytes)
        return _encode(body)

    def _multipart(self) -> bytes:
        random = self._random
        if random.random() < 0.3:
            return self._batch_file()
        part = (
            b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
            b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        )
        size = random.choice((0, 10, 1000, 200_000))
        data = part * random.choice((1, 1, 50)) + random.randbytes(size) + b"\r\n--cut--\r\n"
        return spoil(data, random) if random.random() < 0.5 else data

    def _batch_file(self) -> bytes:
        """The input of a batch: requests, and lines that are none."""
        random, model = self._random, str(self._maker.fixed["model"]).encode()
        lines = [_LINE % (random.randrange(8), model) for _ in range(random.choice((1, 8)))]
        if random.random() < 0.5:
            lines.append(spoil(random.choice(lines), random))
        return (
            b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            + b"".join(lines)
            + b"\r\n--cut--\r\n"
        )


def _encode(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
