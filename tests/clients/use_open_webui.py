"""Open WebUI as its users run it: chats over OpenAI's API, then over Ollama's.

OPEN_WEBUI is its program. It has an environment of its own, 2.4 GB, since it pins what the other
programs require in other versions.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx

MESH, MODEL, PROGRAM = (os.environ[name] for name in ("TOKENMESH_URL", "CHAT_MODEL", "OPEN_WEBUI"))
READY_S = 300.0
COMMON = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "of a server that only this test reaches",
    "OFFLINE_MODE": "True",
    "RAG_EMBEDDING_ENGINE": "openai",
    "ENABLE_VERSION_UPDATE_CHECK": "False",
    "ANONYMIZED_TELEMETRY": "False",
}
OPENAI = {
    "OPENAI_API_BASE_URLS": f"{MESH}/v1",
    "OPENAI_API_KEYS": "none",
    "ENABLE_OLLAMA_API": "False",
}
OLLAMA = {"ENABLE_OPENAI_API": "False", "OLLAMA_BASE_URLS": MESH}
QUESTION = {"role": "user", "content": "What is 27 + 45?"}


@contextmanager
def started(settings: Mapping[str, str]) -> Iterator[httpx.Client]:
    """A client that has signed in."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    # It imports modules from the folder above its data.
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "above", "data")
        os.makedirs(data)
        environment = {**os.environ, **COMMON, **settings, "DATA_DIR": data}
        command = [PROGRAM, "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, env=environment, cwd=data)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                wait_ready(client, process)
                user = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
                client.headers["authorization"] = f"Bearer {user.json()['token']}"
                yield client
        finally:
            process.terminate()
            process.wait(60)


def wait_ready(client: httpx.Client, process: "subprocess.Popen[bytes]") -> None:
    give_up = time.monotonic() + READY_S
    while True:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.5)


for settings, owner in ((OPENAI, "openai"), (OLLAMA, "ollama")):
    with started(settings) as webui:
        models = {each["id"]: each for each in webui.get("/api/models").json()["data"]}
        assert models[MODEL]["owned_by"] == owner, models
        body = {"model": MODEL, "messages": [QUESTION]}
        whole = webui.post("/api/chat/completions", json={**body, "stream": False}).json()
        assert "72" in whole["choices"][0]["message"]["content"], whole
        stream = webui.post("/api/chat/completions", json={**body, "stream": True}).text
        assert stream.count("data: ") > 2, stream
