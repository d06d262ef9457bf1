"""ColQwen2 through real services: texts and images on either side, as transformers scores them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from tests.fakes.colqwen2 import SIZE, Oracle, colqwen2
from tests.fakes.five_services import five_services
from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.pool_mesh import post, refused
from tests.servers import Server, bus_settings_of, free_port, redis_settings_of
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.model import EncoderSettings, ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "retriever"
QUERY = "The quick brown fox"
IMAGES = [picture(1, 37, 52), picture(2, 60, 24)]


def part(image: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(image_file(image))}}


def content(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"content": list(parts)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colqwen2(tmp_path_factory.mktemp("colqwen2"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    checkpoint: Path, nats_server: Server, redis_server: Server
) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(
        models=(
            ModelSettings(
                model=str(checkpoint),
                served_model_name=(MODEL,),
                dtype="float32",
                max_model_len=256,
            ),
        ),
        bus=bus_settings_of(nats_server),
        redis=redis_settings_of(redis_server),
        gateway=GatewaySettings(port=free_port(), max_pool_media=3),
        worker=WorkerSettings(device="cpu", max_num_batched_tokens=32, num_gpu_blocks_override=64),
        encoder=EncoderSettings(device="cpu"),
    )
    async with five_services(settings) as (_, client):
        yield client


def close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["use_activation", "normalize"])
async def test_without_activation_tokens_have_what_the_projection_makes(
    client: httpx.AsyncClient, oracle: Oracle, name: str
) -> None:
    made: list[torch.Tensor] = []
    hook = oracle.model.embedding_proj_layer.register_forward_hook(
        lambda _module, _given, found: made.append(found[0])
    )
    oracle.embeddings(QUERY)
    hook.remove()
    answer = await post(client, "/pooling", model=MODEL, input=QUERY, **{name: False})
    close(answer["data"][0]["data"], made[0])


async def test_tokens_of_texts_and_images_have_the_embeddings_of_transformers(
    client: httpx.AsyncClient, oracle: Oracle
) -> None:
    texts = [QUERY, "jumps"]
    answer = await post(client, "/pooling", model=MODEL, input=texts)
    for text, data in zip(texts, answer["data"], strict=True):
        close(data["data"], oracle.embeddings(text))
    chats: list[Any] = [[{"role": "user", **content(part(image))}] for image in IMAGES]
    chats.append([{"role": "user", "content": QUERY}])
    answer = await post(client, "/pooling", model=MODEL, messages=chats)
    for given, data in zip([*IMAGES, QUERY], answer["data"], strict=True):
        close(data["data"], oracle.embeddings(given))
    prompts = [oracle.inputs(given)["input_ids"][0].tolist() for given in [*IMAGES, QUERY]]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    token = oracle.model.config.vlm_config.image_token_id
    num_tokens = sum(prompt.count(token) for prompt in prompts)
    assert usage["prompt_tokens_details"]["image_tokens"] == num_tokens > 20
    assert len(answer["data"][0]["data"][0]) == SIZE


async def test_either_side_of_a_score_may_be_a_text_or_an_image(
    client: httpx.AsyncClient, oracle: Oracle
) -> None:
    given = [IMAGES[0], "the lazy dog", IMAGES[1]]
    documents = [each if isinstance(each, str) else content(part(each)) for each in given]
    for query in (QUERY, IMAGES[1]):
        side = query if isinstance(query, str) else content(part(query))
        expected = [oracle.score(query, each) for each in given]
        fields = {"text_1": side, "text_2": documents}
        if query is not QUERY:
            fields["text_2"], expected = documents[:2], expected[:2]
        answer = await post(client, "/score", model=MODEL, **fields)
        found = [each["score"] for each in answer["data"]]
        assert found == pytest.approx(expected, abs=1e-4)
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 20
    answer = await post(client, "/rerank", model=MODEL, query=QUERY, documents=documents)
    scores = [oracle.score(QUERY, each) for each in given]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [each["index"] for each in answer["results"]] == order
    by_index = {each["index"]: each for each in answer["results"]}
    assert by_index[1]["document"] == {"text": "the lazy dog"}
    assert "document" not in by_index[0]


async def test_a_request_may_say_how_large_an_image_is(
    client: httpx.AsyncClient, oracle: Oracle
) -> None:
    counts = []
    for options in (
        {},
        {"mm_processor_kwargs": {"size": {"shortest_edge": 64, "longest_edge": 512}}},
    ):
        fields = {"text_1": QUERY, "text_2": content(part(IMAGES[0])), **options}
        answer = await post(client, "/score", model=MODEL, **fields)
        counts.append(answer["usage"]["prompt_tokens_details"]["image_tokens"])
    assert counts[1] < counts[0]


WRONG: list[tuple[dict[str, Any], int, str]] = [
    (content(part(IMAGES[0]), part(IMAGES[1])), 400, "documents[1]"),
    (content(part(IMAGES[0]), {"type": "text", "text": "a"}), 400, "documents[1]"),
    (
        content({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
        400,
        "documents[1].content[0]",
    ),
    (
        content({"type": "image_url", "image_url": {"url": "blob:x"}}),
        400,
        "documents[1].content[0]",
    ),
    (
        content({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}),
        400,
        "documents[1].content[0]",
    ),
    (content({"type": "image_url"}), 400, "documents[1].content[0]"),
    ({"content": [{"type": "input_audio"}]}, 400, "documents[1]"),
]


async def test_what_is_wrong_is_named(client: httpx.AsyncClient) -> None:
    for document, status, param in WRONG:
        found, error = await refused(
            client, "/rerank", model=MODEL, query=QUERY, documents=["a", document]
        )
        assert (found, error["param"]) == (status, param), error
    found, error = await refused(client, "/pooling", model=MODEL, input=["a", "b <|image_pad|>"])
    assert (found, error["param"]) == (400, "input[1]"), error
    many = [content(part(IMAGES[0]))] * 4
    found, error = await refused(client, "/score", model=MODEL, text_1=QUERY, text_2=many)
    text = "the request holds 4 images or videos, at most 3 (gateway.max_pool_media)"
    assert (found, error["message"]) == (413, text)
    chat = [{"role": "user", "content": [part(IMAGES[0])] * 2}]
    found, error = await refused(client, "/pooling", model=MODEL, messages=chat)
    assert found == 400
    assert "one text or one image" in error["message"]
