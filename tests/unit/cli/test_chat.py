"""The chat keeps the conversation, streams answers and explains errors."""

import base64
import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenmesh.cli import chat as chat_module
from tokenmesh.cli.api import ApiError, GatewayClient
from tokenmesh.cli.conversation import ChatHistory
from tokenmesh.cli.main import run
from tokenmesh.shared.errors import InvalidInput, NotFound, Unavailable

URL = "http://mesh"


def event(**delta: str) -> str:
    chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta}]}
    return f"data: {json.dumps(chunk)}\n\n"


class Gateway:
    """Answers as the gateway would, and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.stream = event(content="Hel") + event(content="lo") + "data: [DONE]\n\n"

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        if request.url.path.startswith("/traces/"):
            return httpx.Response(404, json={"error": {"message": "no such trace"}})
        self.bodies.append(json.loads(request.content))
        return httpx.Response(200, text=self.stream)

    def api(self) -> GatewayClient:
        return GatewayClient(URL, "key", httpx.MockTransport(self))


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def answer(conversation: ChatHistory, text: str) -> str:
    return "".join(piece.text for piece in conversation.ask(text))


def test_an_answer_is_streamed_and_joins_the_conversation(gateway: Gateway) -> None:
    conversation = ChatHistory(gateway.api(), "demo", {"temperature": 0})
    assert answer(conversation, "hi") == "Hello"
    assert conversation.request_id == "chatcmpl-1"
    answer(conversation, "again")
    assert gateway.bodies[1] == {
        "model": "demo",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "again"},
        ],
    }


def test_system_prompt_and_reset_are_commands(gateway: Gateway) -> None:
    conversation = ChatHistory(gateway.api(), "demo", {})
    answer(conversation, "hi")
    conversation.command("/system be kind")
    conversation.command("/reset")
    assert conversation.messages == [{"role": "system", "content": "be kind"}]
    assert conversation.command("/system") == "no system prompt"
    assert conversation.messages == []
    with pytest.raises(InvalidInput, match="/rest"):
        conversation.command("/rest")


def test_a_broken_answer_leaves_the_conversation_as_it_was(gateway: Gateway) -> None:
    gateway.stream = event(content="Hel") + 'data: {"error": {"message": "worker died"}}\n\n'
    conversation = ChatHistory(gateway.api(), "demo", {})
    with pytest.raises(ApiError, match="worker died"):
        answer(conversation, "hi")
    assert conversation.messages == []


def test_reasoning_is_reported_apart_from_the_answer(gateway: Gateway) -> None:
    gateway.stream = event(reasoning_content="hm") + event(content="4")
    pieces = list(ChatHistory(gateway.api(), "demo", {}).ask("2+2"))
    assert [(piece.reasoning, piece.text) for piece in pieces] == [("hm", ""), ("", "4")]


def test_the_speed_of_an_answer_is_shown(gateway: Gateway) -> None:
    usage = {"id": "chatcmpl-1", "choices": [], "usage": {"completion_tokens": 7}}
    gateway.stream = event(content="Hello") + f"data: {json.dumps(usage)}\n\n"
    conversation = ChatHistory(gateway.api(), "demo", {})
    answer(conversation, "hi")
    assert re.fullmatch(r"7 tokens, [\d.]+ tokens/s, the first after [\d.]+ s", conversation.speed)


def test_fields_of_the_requests_can_be_set_and_taken_back(gateway: Gateway) -> None:
    conversation = ChatHistory(gateway.api(), "demo", {})
    conversation.command("/set temperature 0.5")
    assert conversation.command("/set stop END") == 'temperature = 0.5\nstop = "END"'
    answer(conversation, "hi")
    assert (gateway.bodies[0]["temperature"], gateway.bodies[0]["stop"]) == (0.5, "END")
    conversation.command("/set stop")
    assert conversation.command("/set") == "temperature = 0.5"


@pytest.mark.parametrize(
    "words", ["temperature hot", "max_tokens many", "n 1.5", "ignore_eos 3", "logprobs yes"]
)
def test_a_value_of_another_type_is_refused_when_it_is_set(gateway: Gateway, words: str) -> None:
    conversation = ChatHistory(gateway.api(), "demo", {})
    with pytest.raises(InvalidInput, match=words.split()[0]):
        conversation.command(f"/set {words}")
    assert conversation.command("/set temperature 1") == "temperature = 1"


def test_the_model_can_be_changed_to_another_served_one(gateway: Gateway) -> None:
    conversation = ChatHistory(gateway.api(), "other", {})
    assert conversation.command("/model") == "  demo"
    conversation.command("/model demo")
    assert conversation.model == "demo"
    with pytest.raises(InvalidInput, match="not served"):
        conversation.command("/model unknown")


def test_an_image_goes_with_one_message(gateway: Gateway, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"png")
    conversation = ChatHistory(gateway.api(), "demo", {})
    conversation.command(f"/image {picture}")
    answer(conversation, "what is it?")
    answer(conversation, "sure?")
    first, _, second = gateway.bodies[1]["messages"]
    url = f"data:image/png;base64,{base64.b64encode(b'png').decode()}"
    assert first["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "what is it?"},
    ]
    assert second["content"] == "sure?"
    for wrong in (tmp_path / "gone.png", tmp_path / "notes.txt"):
        with pytest.raises(InvalidInput):
            conversation.command(f"/image {wrong}")


def test_a_conversation_is_saved_once(gateway: Gateway, tmp_path: Path) -> None:
    conversation = ChatHistory(gateway.api(), "demo", {"seed": 1})
    answer(conversation, "hi")
    file = tmp_path / "chat.json"
    conversation.command(f"/save {file}")
    assert json.loads(file.read_text()) == {
        "model": "demo", "seed": 1, "messages": conversation.messages,
    }  # fmt: skip
    with pytest.raises(InvalidInput, match="exists"):
        conversation.command(f"/save {file}")


def test_the_first_served_model_is_found(gateway: Gateway) -> None:
    assert gateway.api().models() == ["demo"]


def test_an_unknown_trace_is_not_found(gateway: Gateway) -> None:
    with pytest.raises(NotFound, match="no such trace"):
        gateway.api().trace("x")


def test_a_gateway_that_is_not_there_is_explained() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(Unavailable, match="tokenmesh up"):
        GatewayClient(URL, transport=httpx.MockTransport(refuse)).models()


def test_an_answer_that_is_not_ours_is_explained() -> None:
    api = GatewayClient(
        URL, transport=httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    )
    with pytest.raises(ApiError, match="does not answer like TokenMesh"):
        api.models()


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
            monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        for host in ("127.0.0.1", "localhost"):
            with GatewayClient(f"http://{host}:{server.server_port}") as api:
                assert api.models() == ["demo"]
        server.shutdown()


class Models(BaseHTTPRequestHandler):
    """Lists one model."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "demo"}]}')

    def log_message(self, *_: object) -> None:
        """Nothing is shown."""


@pytest.mark.parametrize(
    ("variable", "path"),
    [("TOKENMESH_URL", ""), ("OPENAI_BASE_URL", "/v1"), ("TOKENMESH_URL", "/")],
)
def test_the_address_comes_from_the_environment(
    variable: str, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(variable, f"http://127.0.0.1:{server.server_port}{path}")
        monkeypatch.setattr("sys.stdin", io.StringIO("/model\n"))
        assert run(["chat"]) == 0
        server.shutdown()
    assert "demo" in capsys.readouterr().out


def test_the_first_of_several_choices_is_the_answer(gateway: Gateway) -> None:
    second = {"id": "chatcmpl-1", "choices": [{"index": 1, "delta": {"content": "no"}}]}
    gateway.stream = event(content="yes") + f"data: {json.dumps(second)}\n\n"
    assert answer(ChatHistory(gateway.api(), "demo", {"n": 2}), "hi") == "yes"


def test_a_piped_line_in_another_encoding_is_sent_with_what_can_be_read(
    monkeypatch: pytest.MonkeyPatch, gateway: Gateway
) -> None:
    for errors in ("strict", "surrogateescape"):
        piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", piped)
        monkeypatch.setattr(chat_module, "GatewayClient", lambda *_: gateway.api())
        chat_module.chat(URL)
        assert gateway.bodies[-1]["messages"] == [{"role": "user", "content": "caf\ufffd"}]
