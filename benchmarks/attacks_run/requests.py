"""The bytes of each attack. `{model}` and the key are the caller's."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

MEBIBYTE: Final = 1024 * 1024

Make = Callable[[str], bytes]
"""From a model's name to a body."""


def post(path: str, body: bytes, key: str | None, kind: str = "application/json") -> bytes:
    """A whole request."""
    fields = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}"]
    fields += [f"Content-Length: {len(body)}", *_authorization(key)]
    return "\r\n".join([*fields, "", ""]).encode() + body


def bare(method: str, target: str, key: str | None) -> bytes:
    """A request without a body."""
    fields = [f"{method} {target} HTTP/1.1", "Host: localhost", *_authorization(key)]
    return "\r\n".join([*fields, "", ""]).encode()


def _authorization(key: str | None) -> list[str]:
    return [] if key is None else [f"Authorization: Bearer {key}"]


def _repeat(begun: bytes, piece: bytes, end: bytes, size: int = 8 * MEBIBYTE) -> Make:
    def make(model: str) -> bytes:
        head = b'{"model":%s,' % json.dumps(model).encode() + begun
        return head + piece * ((size - len(head) - len(end)) // len(piece)) + end

    return make


def _chat(**fields: Any) -> Make:
    def make(model: str) -> bytes:
        messages = [{"role": "user", "content": "Hi"}]
        return json.dumps({"model": model, "messages": messages, **fields}).encode()

    return make


def _schema(pattern: str, count: int) -> dict[str, Any]:
    schema = {"anyOf": [{"type": "string", "pattern": pattern} for _ in range(count)]}
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def _batch(model: str) -> bytes:
    body = json.loads(_chat(response_format=_schema("{" + "1" * 4000, 60))(model))
    return json.dumps({**body, "messages": [body["messages"]] * 1000}).encode()


def _upload(_model: str) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return head + b"x" * (16 * MEBIBYTE) + b"\r\n--b--\r\n"


_CHAT: Final = "/v1/chat/completions"
_PLAIN: Final = "/v1/completions"
_HI: Final = b'"messages":[{"role":"user","content":"Hi"}],'

BODIES: Final[Mapping[str, tuple[str, Make]]] = {
    "prompt of -1": (_PLAIN, _repeat(b'"prompt":[', b"-1,", b"-1]}")),
    "prompt of [-1]": (_PLAIN, _repeat(b'"prompt":[', b"[-1],", b"[-1]]}")),
    "prompt of 1M ids": (_PLAIN, _repeat(b'"prompt":[', b"12345,", b"1]}", 6 * MEBIBYTE)),
    "prompt of 500k ids": (_PLAIN, _repeat(b'"prompt":[', b"12345,", b"1]}", 3_000_000)),
    "messages of 1": (_CHAT, _repeat(b'"messages":[', b"1,", b"1]}")),
    "messages of {}": (_CHAT, _repeat(b'"messages":[', b"{},", b"{}]}")),
    "stop of 1": (_CHAT, _repeat(_HI + b'"stop":[', b"1,", b"1]}")),
    "extra values": (_CHAT, _repeat(_HI + b'"x":[', b'"",', b'""]}')),
    "open brackets": (_CHAT, _repeat(b'"messages":', b"[", b"")),
    "8 MiB text": (_CHAT, _repeat(b'"messages":[{"role":"user","content":"', b"word ", b'"}]}')),
    "4 MB chat": (
        _CHAT,
        _repeat(b'"messages":[{"role":"user","content":"', b"word ", b'"}]}', 4 * MEBIBYTE - 4096),
    ),
    "escapes": (_PLAIN, _repeat(b'"prompt":"', rb"\u00e9", b'"}')),
    "oversize body": (_CHAT, _repeat(b'"x":"', b"y", b'"}', 24 * MEBIBYTE)),
    "items of system": (
        "/v1/responses",
        _repeat(b'"store":false,"input":[', b'{"role":"system","content":"a"},', b"{}]}", MEBIBYTE),
    ),
    "regex bombs": (_CHAT, _chat(response_format=_schema("{" + "1" * 4000, 62))),
    "long regex": (_CHAT, _chat(response_format=_schema("(a{1,9}|[b-z]+)" * 260, 62))),
    "batch of regex bombs": (f"{_CHAT}/batch", _batch),
    "logit_bias digits": (_CHAT, _chat(logit_bias={"9" * 5000: 1})),
    "tokenize 1 MB": ("/tokenize", _repeat(b'"prompt":"', b"word ", b'"}', MEBIBYTE)),
    "uploads": ("/v1/files", _upload),
}
BARE: Final = {
    "CONNECT": ("CONNECT", "a:80"),
    "upgrades": (
        "GET",
        "/livez HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nX: y\r\n\r\nGET /",
    ),
    "pipelined": (
        "GET",
        "/livez HTTP/1.1\r\n\r\n" + "GET /livez HTTP/1.1\r\n\r\n" * 10_000 + "GET /",
    ),
}
TEXTS: Final[Mapping[str, tuple[str, Make]]] = {
    "suffix": (
        _PLAIN,
        _repeat(b'"prompt":[100,101],"max_tokens":1,"suffix":"', b"aZ9 _", b'"}', 2_500_000),
    ),
    "suffixes": (_PLAIN, lambda model: _suffixes(model)),
    "bad words": (_CHAT, _repeat(_HI + b'"bad_words":["', b"w", b'"]}', 3_000_000)),
    "special tokens": (
        _CHAT,
        _repeat(b'"messages":[{"role":"user","content":"', b"<|im_end|>aZ9 _", b'"}]}', MEBIBYTE),
    ),
    "one long word": (
        _CHAT,
        _repeat(b'"messages":[{"role":"user","content":"', b"aZ9_", b'"}]}', MEBIBYTE),
    ),
    "truncated": (
        _PLAIN,
        _repeat(b'"truncate_prompt_tokens":1,"prompt":"', b"aZ9 _", b'"}', 3_900_000),
    ),
}
"""Attacks on a model that takes 131,072 tokens and a suffix, with its special tokens guarded."""
READS: Final[Mapping[str, str]] = {
    "GET document": "/openapi.json",
    "GET models": "/v1/models",
    "GET usage": "/v1/usage",
    "GET traces": "/traces?limit=500",
    "GET response": "/v1/responses/{id}",
    "GET response's events": "/v1/responses/{id}?stream=true",
    "GET response's input": "/v1/responses/{id}/input_items?limit=100",
}
"""With the tenant's key; `{id}` is a response that it has stored."""
STORED: Final = (
    "/v1/responses",
    # Without an end of its own the simulated model would go on to the end of its long context.
    _repeat(b'"store":true,"max_output_tokens":512,"input":"', b"word ", b'"}', 50_000),
)
SILENT_TLS: Final = "silent TLS"
"""Connections to a TLS port that never begin a handshake."""
NAMES: Final = (*BARE, *BODIES, *TEXTS, *READS, SILENT_TLS)


def _suffixes(model: str) -> bytes:
    body = {"prompt": [[100, 101]] * 64, "max_tokens": 1, "suffix": "aZ9 _" * 4000}
    return json.dumps({"model": model, **body}).encode()


def request(name: str, model: str, key: str | None) -> bytes:
    """One request of an attack."""
    if name in BARE:
        return bare(*BARE[name], key)
    if name in READS:
        return bare("GET", READS[name], key)
    path, make = {**BODIES, **TEXTS}[name]
    kind = "multipart/form-data; boundary=b" if name == "uploads" else "application/json"
    return post(path, make(model), key, kind)
