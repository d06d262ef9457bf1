"""The openai client's embeddings, unchanged, and what a tenant is charged for them."""

import openai
import pytest

from tests.fakes.pool_mesh import CACHED, PoolMesh, expected, tokens
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

TEXTS = ["The quick brown fox", "jumps"]


async def test_embeddings_of_the_openai_client(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        PoolMesh(bus_settings, redis_settings, "embed") as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client,
    ):
        # The client requests base64 unless it is given a format.
        answer = await client.embeddings.create(model=mesh.model, input=TEXTS)
        assert [each.embedding for each in answer.data] == [expected(text) for text in TEXTS]
        plain = await client.embeddings.create(
            model=mesh.model, input=TEXTS, encoding_format="float", dimensions=4
        )
        assert [each.embedding for each in plain.data] == [expected(t, dims=4) for t in TEXTS]
        num_tokens = sum(len(tokens(text)) for text in TEXTS)
        assert answer.usage.prompt_tokens == num_tokens
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model=mesh.model, input="word " * 400)
        assert caught.value.code == "context_length_exceeded"
        metrics = mesh.metrics.render().decode()
        charged = 'tokenmesh:tenant_tokens_total{kind="%s",tenant="default"} %.1f'
        assert charged % ("prompt", 2 * num_tokens) in metrics
        assert charged % ("cached", 2 * CACHED) in metrics
        assert 'tokenmesh:pool_batches_total{task="embed"} 2.0' in metrics
        assert 'finished_reason="stop"' in metrics
