"""Models with one task: classes, scores by embeddings and by late interaction."""

import httpx
import numpy
import pytest

from tests.fakes.pool_mesh import SIZE, PoolMesh, expected, post, refused, tokens
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog, and so on and on"]


async def test_classes_have_the_names_of_the_model(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    labels = [f"label {index}" for index in range(SIZE)]
    async with (
        PoolMesh(bus_settings, redis_settings, "classify", card={"labels": labels}) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        answer = await post(client, "/classify", input=TEXTS, use_activation=False)
        for text, each in zip(TEXTS, answer["data"], strict=True):
            probs = expected(text, "classify")
            assert each["probs"] == probs
            assert each["label"] == labels[probs.index(max(probs))]
            assert each["num_classes"] == SIZE
        assert {pool.params.use_activation for pool in mesh.pools} == {False}
        status, error = await refused(client, "/v1/embeddings", input="a")
        assert status == 400
        assert error["message"].endswith("does not have the task embed; its tasks: classify")
        status, error = await refused(client, "/v1/completions", prompt="a")
        assert status == 400
        assert error["message"].endswith("does not generate; its tasks: classify")
        models = (await client.get("/v1/models")).json()
        assert models["data"][0]["tasks"] == ["classify"]


async def test_embeddings_make_scores(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        PoolMesh(bus_settings, redis_settings, "embed") as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        answer = await post(client, "/score", text_1="a fox", text_2=TEXTS)
        one = numpy.array(expected("a fox"))
        others = [numpy.array(expected(text)) for text in TEXTS]
        sizes = [numpy.linalg.norm(one) * numpy.linalg.norm(each) for each in others]
        wanted = [float(one @ each / size) for each, size in zip(others, sizes, strict=True)]
        assert [each["score"] for each in answer["data"]] == pytest.approx(wanted)
        lengths = [len(tokens(text)) for text in ("a fox", *TEXTS)]
        assert answer["usage"]["prompt_tokens"] == sum(lengths)
        answer = await post(client, "/score", text_1=TEXTS, text_2=TEXTS)
        assert [each["score"] for each in answer["data"]] == pytest.approx([1.0] * 3)


async def test_late_interaction_makes_scores(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        PoolMesh(bus_settings, redis_settings, "token_embed", pool_batch_tokens=8) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        answer = await post(client, "/rerank", query="a fox", documents=TEXTS)
        query = numpy.array(expected("a fox", "token_embed"))
        products = [query @ numpy.array(expected(text, "token_embed")).T for text in TEXTS]
        wanted = [float(each.max(axis=1).sum()) for each in products]
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert [found[index] for index in range(3)] == pytest.approx(wanted, rel=1e-5)
