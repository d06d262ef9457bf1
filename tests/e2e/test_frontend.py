"""`tokenmesh serve gateway` and `tokenmesh serve tokenizer` alone are a frontend without a GPU."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.servers import bus_settings_of, make_nats, make_redis, redis_settings_of
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import DEMO_MODEL, plain_values

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
READY_S = 90.0


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two processes, a NATS and a Redis; the URL of the gateway."""
    port = free_port()
    folder = tmp_path_factory.mktemp("frontend")
    with ExitStack() as stack:
        nats, redis = make_nats(folder), make_redis(folder)
        for server in (nats, redis):
            server.start()
            stack.callback(server.stop)
        settings = Settings(bus=bus_settings_of(nats), redis=redis_settings_of(redis))
        config = folder / "mesh.json"
        config.write_text(json.dumps(plain_values(settings)))
        for own in (
            ("gateway", "--enable-scale-out", "--render-only", "--port", str(port)),
            ("tokenizer", "--model", str(DEMO_MODEL), "--served-model-name", "demo"),
        ):
            command = [sys.executable, "-m", "tokenmesh", "serve", *own, "--config", str(config)]
            process = subprocess.Popen(command)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url)
        yield url


def _wait_ready(url: str) -> None:
    give_up = time.monotonic() + READY_S
    while time.monotonic() < give_up:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail("the frontend is not ready")


def test_prompts_become_tokens_and_tokens_answers(frontend: str) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
    rendered = httpx.post(f"{frontend}/v1/chat/completions/render", json=chat)
    assert rendered.status_code == 200, rendered.text
    ids = rendered.json()["token_ids"]
    generated = {"choices": [{"index": 0, "token_ids": ids[:3], "finish_reason": "length"}]}
    answer = httpx.post(
        f"{frontend}/v1/chat/completions/derender",
        json={"generate_response": generated, "prompt_token_ids": ids, "chat_request": chat},
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
