"""A client of the scale-out routes: render, generate and derender in place of one call."""

import json
from typing import Any

import httpx

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd, eos_id, fake_tokenizer
from tokenmesh.shared import subjects
from tokenmesh.shared.ids import new_instance_id
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import ModelCard

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
GENERATE = "/inference/v1/generate"


async def announce_tokenizer(mesh: BackEnd) -> None:
    """Let the fake tokenizer say that it is there, as a service does."""
    name = new_instance_id("tokenizer")
    card = ModelCard(
        name=mesh.model,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=fake_tokenizer().get_vocab_size(),
        eos_token_ids=[eos_id()],
    )
    beat = Heartbeat(
        service="tokenizer",
        instance_id=name,
        epoch=1,
        sequence=1,
        version="0",
        interval_s=60.0,
        tokenizes=[card],
    )
    await mesh.bus.publish(subjects.beat("tokenizer", name), beat)
    await mesh.until(lambda: bool(mesh.members.service("tokenizer")))


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON events of a stream."""
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


class ThreeCalls:
    """Talks to one gateway."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, path: str, body: Any) -> httpx.Response:
        """An answer that is 200."""
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response

    async def whole(self, path: str, body: dict[str, Any]) -> Any:
        """As one call would answer."""
        rendered = (await self.post(f"{path}/render", body)).json()
        requests = rendered if isinstance(rendered, list) else [rendered]
        answers = [(await self.post(GENERATE, each)).json() for each in requests]
        ids = [each["token_ids"] for each in requests]
        if path == CHAT:
            derender = {
                "generate_response": answers[0],
                "prompt_token_ids": ids[0],
                "chat_request": body,
            }
        else:
            derender = {
                "generate_responses": answers,
                "prompt_token_ids": ids,
                "completion_request": body,
            }
        return (await self.post(f"{path}/derender", derender)).json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The chunks that one call would stream."""
        rendered = (await self.post(f"{path}/render", body)).json()
        requests = rendered if isinstance(rendered, list) else [rendered]
        chunks = []
        for index, request in enumerate(requests):
            chunks += await self._derendered(path, body, request, index)
        return chunks

    async def _derendered(
        self, path: str, body: dict[str, Any], request: dict[str, Any], prompt_index: int
    ) -> list[Any]:
        state: dict[int, Any] = {}
        chunks = []
        for event in events_of(await self.post(GENERATE, request)):
            index = event["choices"][0]["index"] if event["choices"] else 0
            derender = {
                "stream": True,
                "generate_chunk": event,
                "stream_state": state.get(index),
                "prompt_token_ids": request["token_ids"],
                "prompt_tokens": len(request["token_ids"]),
                "chat_request" if path == CHAT else "completion_request": body,
            }
            if path == COMPLETION:
                derender["prompt_index"] = prompt_index
            answer = (await self.post(f"{path}/derender", derender)).json()
            state[index] = answer["stream_state"]
            chunks.append(answer["chunk"])
        return chunks
