"""Texts that are longer than the model, embedded in parts, and prompts that are filled up."""

from typing import Any

import httpx
import numpy
import pytest

from tests.fakes.back_end import MAX_MODEL_LEN
from tests.fakes.pool_mesh import SIZE, PoolMesh, expected, post, refused, tokens
from tokenmesh.services.gateway.core.pooling.arrays import mean
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import IMAGE, MediaItem
from tokenmesh.shared.messages.pooling import Pooled
from tokenmesh.shared.tokens import count_ids, unpack_ids

LONG = [10 + index % 90 for index in range(2 * MAX_MODEL_LEN + 9)]
FITS = LONG[:MAX_MODEL_LEN]


def weighted(ids: list[int]) -> Any:
    """The mean of what the fake worker computes for the parts, whose lengths are not 1."""
    parts = [ids[start : start + MAX_MODEL_LEN] for start in range(0, len(ids), MAX_MODEL_LEN)]
    return numpy.average(list(map(expected, parts)), axis=0, weights=list(map(len, parts)))


async def test_long_texts_are_embedded_as_the_weighted_mean_of_their_parts(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    card = {"embeds_in_chunks": True, "max_embed_len": len(LONG)}
    async with (
        PoolMesh(bus_settings, redis_settings, "embed", card=card) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        for path, data in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            answer = await post(client, path, input=[[7, 8], LONG, FITS])
            found = [each[data] for each in answer["data"]]
            assert found[0] == expected([7, 8])
            numpy.testing.assert_allclose(found[1], weighted(LONG), atol=1e-6)
            assert found[2] == expected(FITS)
            assert answer["usage"]["prompt_tokens"] == 2 + len(LONG) + len(FITS)
        text = "over the lazy dog " * 100
        assert MAX_MODEL_LEN < len(tokens(text)) < len(LONG)
        answer = await post(client, "/v2/embed", texts=[text], truncate="NONE")
        (found,) = answer["embeddings"]["float"]
        numpy.testing.assert_allclose(found, weighted(tokens(text)), atol=1e-6)
        assert answer["meta"]["billed_units"]["input_tokens"] == len(tokens(text))
        sizes = [count_ids(item.prompt_ids) for pool in mesh.pools for item in pool.items]
        assert max(sizes) == MAX_MODEL_LEN

        status, error = await refused(client, "/v1/embeddings", input=[*LONG, 1])
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert str(len(LONG)) in error["message"]
        answer = await post(client, "/v1/embeddings", input=[*LONG, 1], truncate_prompt_tokens=-1)
        numpy.testing.assert_allclose(answer["data"][0]["embedding"], weighted(LONG), atol=1e-6)
        status, error = await refused(client, "/score", text_1=text, text_2="a")
        assert error["code"] == "context_length_exceeded"


async def test_a_prompt_with_an_image_is_not_embedded_in_parts(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    card = {"embeds_in_chunks": True}
    async with (
        PoolMesh(bus_settings, redis_settings, "embed", card=card) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        key = BlobKey("image")
        item = MediaItem(kind=IMAGE, content_hash=key, offset=0, length=1, pixels=key)
        mesh.tokenizer.media = [item]
        chat = [{"role": "user", "content": "over the lazy dog " * 150}]
        status, error = await refused(client, "/v1/embeddings", messages=chat)
        assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_the_longest_text_may_be_shorter_than_the_model(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        PoolMesh(bus_settings, redis_settings, "embed", card={"max_embed_len": 5}) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        await post(client, "/v1/embeddings", input=[1, 2, 3, 4, 5])
        status, error = await refused(client, "/v1/embeddings", input=[1, 2, 3, 4, 5, 6])
        assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_prompts_are_filled_up_where_the_request_says_so(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        PoolMesh(bus_settings, redis_settings, "embed", "score", pool_batch_tokens=8) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        status, error = await refused(client, "/v1/embeddings", input="a", padding="max_length")
        assert (status, error["param"]) == (400, "padding")
        mesh.tokenizer.padding_id = 3
        filled = [*tokens("a fox"), *[3] * (MAX_MODEL_LEN - len(tokens("a fox")))]
        for given in ("a fox", tokens("a fox")):
            body = {"input": given, "padding": "max_length"}
            answer = await post(client, "/v1/embeddings", **body)
            assert answer["data"][0]["embedding"] == expected(filled)
            assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN
        mesh.pools.clear()
        await post(client, "/score", text_1="a", text_2=["b", "c"], padding="max_length")
        items = [item for pool in mesh.pools if pool.params.task == "score" for item in pool.items]
        for item in items:
            assert len(item.type_ids) == MAX_MODEL_LEN
            assert len(unpack_ids(item.prompt_ids)) == MAX_MODEL_LEN
        assert len(items) == 2
        answer = await post(client, "/v1/embeddings", input="a fox", padding="do_not_pad")
        assert answer["data"][0]["embedding"] == expected("a fox")
        many = [[1]] * (1 + (1 << 20) // MAX_MODEL_LEN)
        status, error = await refused(client, "/v1/embeddings", input=many, padding="max_length")
        assert status in (400, 413)


@pytest.mark.parametrize(("scale", "normalizes"), [(1.0, True), (1.0, False), (2.0, True)])
def test_a_mean_has_length_1_where_the_parts_have(scale: float, normalizes: bool) -> None:
    rows = numpy.random.default_rng(0).normal(size=(3, SIZE))
    rows *= scale / numpy.linalg.norm(rows, axis=1, keepdims=True)
    parts = [Pooled([SIZE], row.astype("<f4").tobytes()) for row in rows]
    found = numpy.frombuffer(mean(parts, [4, 4, 1], normalizes=normalizes).data, "<f4")
    wanted = numpy.average(rows, axis=0, weights=[4, 4, 1])
    if scale == 1.0 and normalizes:
        wanted /= numpy.linalg.norm(wanted)
    numpy.testing.assert_allclose(found, wanted, atol=1e-6)
