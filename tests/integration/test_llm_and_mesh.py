"""LLM draws what a mesh draws, for the same prompts, seeds and settings."""

from pathlib import Path
from typing import Any

import tokenmesh
from tests.fakes.demo_mesh import demo_mesh
from tests.servers import Server
from tokenmesh.engine import LLM
from tokenmesh.shared.messages.sampling import SamplingParams

DEMO = str(Path(tokenmesh.__file__).parent / "demo_model")
QUESTIONS = ("What is 21 + 17?", "What is TokenMesh?", "Tell me a story.")
TEXT = "The mesh has"


async def test_a_chat_and_a_completion_have_the_tokens_of_the_mesh(
    nats_server: Server, redis_server: Server
) -> None:
    fields: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 24}
    chats, plain = [], []
    async with demo_mesh(nats_server, redis_server) as client:
        for seed, question in enumerate(QUESTIONS):
            body = {"model": "demo", "seed": seed, "return_token_ids": True, **fields}
            messages = [{"role": "user", "content": question}]
            answer = await client.post("/v1/chat/completions", json={**body, "messages": messages})
            chats.append(answer.json()["choices"][0])
            answer = await client.post("/v1/completions", json={**body, "prompt": TEXT})
            plain.append(answer.json()["choices"][0])
    llm = LLM(DEMO, device="cpu", num_gpu_blocks_override=256)
    sampling = [SamplingParams(seed=seed, **fields) for seed in range(len(QUESTIONS))]
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for completion, choice in zip(llm.chat(conversations, sampling), chats, strict=True):
        assert completion.token_ids == choice["token_ids"]
        assert completion.text == choice["message"]["content"]
    for completion, choice in zip(llm.generate([TEXT] * 3, sampling), plain, strict=True):
        assert completion.token_ids == choice["token_ids"]
        assert completion.text == choice["text"]
        assert completion.finish_reason == choice["finish_reason"]
