"""Moderations: a classifier's labels as OpenAI's categories, with OpenAI's client."""

from array import array
from typing import Any

import openai
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.pool_mesh import PoolMesh
from tokenmesh.services.gateway.apis.pooling.moderations import categories_of, result_of
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.requests import PoolingSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages import Pool, PoolAnswer
from tokenmesh.shared.messages.pooling import Pooled

LABELS = ["non-toxic", "identity_hate", "severe_toxic", "spam"]
SCORES = [0.1, 0.9, 0.25, 0.5]
PART: Any = [{"type": "text", "text": "a"}]
IMAGE: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]


def answer(pool: Pool) -> PoolAnswer:
    return PoolAnswer(pooled=[Pooled([4], array("f", SCORES).tobytes()) for _ in pool.items])


async def test_labels_become_categories(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    card = {"labels": LABELS, "pooled_size": len(LABELS)}
    async with PoolMesh(bus_settings, redis_settings, "classify", card=card) as mesh:
        mesh.answer = answer
        async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="x") as client:
            found = await client.moderations.create(input=["one", "two"])
            one = await client.moderations.create(input=PART, model="omni-moderation-latest")
            with pytest.raises(openai.BadRequestError, match="images are not moderated"):
                await client.moderations.create(input=IMAGE)
    assert found.id.startswith("modr-")
    assert (found.model, len(found.results), len(one.results)) == (mesh.model, 2, 1)
    result = found.results[0]
    assert result.flagged
    assert result.categories.hate
    assert not result.categories.harassment
    assert result.category_scores.hate == pytest.approx(0.9)
    assert result.category_scores.harassment == 0.25
    assert result.category_scores.violence == 0
    assert result.category_applied_input_types.hate == ["text"]
    assert result.category_applied_input_types.violence == []
    assert result.model_dump()["category_scores"]["spam"] == 0.5


async def test_without_a_classifier_moderations_are_refused(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="x") as client,
    ):
        with pytest.raises(openai.BadRequestError, match="no classifier is served"):
            await client.moderations.create(input="text")
        with pytest.raises(openai.BadRequestError, match="does not have the task classify"):
            await client.moderations.create(input="text", model=mesh.model)


def test_labels_without_a_category_are_refused_unless_they_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"LABEL_0, LABEL_1.*moderation_labels"):
        categories_of(["LABEL_0", "LABEL_1"], PoolingSettings())
    own = PoolingSettings(moderation_labels={"LABEL_0": "safe", "LABEL_1": "violence"})
    assert categories_of(["LABEL_0", "LABEL_1"], own) == ["safe", "violence"]


def test_a_category_has_the_score_of_its_strongest_label() -> None:
    result = result_of(["harassment", "safe", "harassment"], [0.2, 0.9, 0.6], 0.5)
    assert result.category_scores["harassment"] == 0.6
    assert [name for name, flag in result.categories.items() if flag] == ["harassment"]
