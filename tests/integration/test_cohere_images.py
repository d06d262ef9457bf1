"""Cohere's embed with images, through real services: the embeddings of transformers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from torch.nn.functional import normalize

from tests.fakes.five_services import five_services
from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.media_models import MEDIA, media_checkpoint, oracle
from tests.fakes.pool_mesh import PoolMesh, post, refused
from tests.servers import Server, bus_settings_of, free_port, redis_settings_of
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.model import EncoderSettings, ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

NAME = "qwen3_vl"
MODEL = "pictures"
IMAGES = [picture(1, 37, 52), picture(2, 60, 24)]


def uri(image: Any) -> str:
    return data_uri(image_file(image))


def part(image: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(image)}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(NAME)
    media_checkpoint(directory, NAME)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    checkpoint: Path, nats_server: Server, redis_server: Server
) -> AsyncIterator[httpx.AsyncClient]:
    model = ModelSettings(
        model=str(checkpoint),
        served_model_name=(MODEL,),
        dtype="float32",
        max_model_len=128,
        runner="pooling",
    )
    settings = Settings(
        models=(model,),
        bus=bus_settings_of(nats_server),
        redis=redis_settings_of(redis_server),
        gateway=GatewaySettings(port=free_port(), max_pool_media=3),
        worker=WorkerSettings(device="cpu", num_gpu_blocks_override=64),
        encoder=EncoderSettings(device="cpu"),
    )
    async with five_services(settings) as (_, client):
        yield client


class Oracle:
    """transformers' embedding of a message, and the tokens of its prompts so far."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor = ItemProcessor(checkpoint)._processor
        self._model = oracle(checkpoint, NAME)
        self.num_tokens = 0

    @torch.inference_mode()
    def embedding(self, *parts: Any) -> torch.Tensor:
        """Return the embedding of texts and images in their order."""
        texts = [each if isinstance(each, str) else MEDIA[NAME].placeholder for each in parts]
        images = [each for each in parts if not isinstance(each, str)]
        prompt = f"<|im_start|>user\n{''.join(texts)}<|im_end|>\n"
        named = {"images": [images]} if images else {}
        found = self._processor(text=[prompt], return_tensors="np", **named)
        inputs: Any = {name: torch.tensor(value) for name, value in found.items()}
        self._model.model.rope_deltas = None
        states = self._model.model(**inputs).last_hidden_state[0]
        self.num_tokens += len(states)
        return normalize(states[-1], dim=0)


def close(found: Any, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.stack(expected), atol=5e-5, rtol=0)


async def test_images_have_the_embeddings_of_transformers(
    client: httpx.AsyncClient, checkpoint: Path
) -> None:
    judge = Oracle(checkpoint)
    body = {"model": MODEL, "images": [uri(each) for each in IMAGES], "input_type": "image"}
    answer = await post(client, "/v2/embed", **body)
    close(answer["embeddings"]["float"], [judge.embedding(each) for each in IMAGES])
    assert answer["texts"] == []
    billed = answer["meta"]["billed_units"]
    assert billed["images"] == 2
    assert billed["input_tokens"] == judge.num_tokens > billed["image_tokens"] > 0
    kinds = ["float", "ubinary"]
    again = await post(client, "/v1/embed", **body, embedding_types=kinds)
    assert again["embeddings"]["float"] == answer["embeddings"]["float"]


async def test_inputs_mix_texts_and_images(client: httpx.AsyncClient, checkpoint: Path) -> None:
    judge = Oracle(checkpoint)
    inputs = [
        {"content": [said("The quick "), part(IMAGES[1]), said(" fox")]},
        {"content": [said("jumps")]},
        {"content": [part(IMAGES[0])]},
    ]
    answer = await post(client, "/v2/embed", model=MODEL, inputs=inputs)
    found = answer["embeddings"]["float"]
    expected = [judge.embedding("The quick ", IMAGES[1], " fox"), judge.embedding(IMAGES[0])]
    close([found[0], found[2]], expected)
    alone = await post(client, "/v2/embed", model=MODEL, texts=["jumps"])
    close(alone["embeddings"]["float"], [torch.tensor(found[1])])
    assert "images" not in alone["meta"]["billed_units"]
    assert answer["texts"] == ["jumps"]


@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        ({"images": []}, "images", "images is empty"),
        ({"images": ["https://example.com/a.png"]}, "images", r"images[0] must be a data URI"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images[0]", "images[0]"),
        ({"texts": ["a"], "images": []}, "texts", "send one of texts, images and inputs"),
        ({"texts": ["a"], "input_type": "image"}, "input_type", "cannot be combined with texts"),
        (
            {"images": [uri(IMAGES[0])], "max_tokens": 3},
            "max_tokens",
            "what holds images is not cut",
        ),
        (
            {"inputs": [{"content": [said("fox " * 150), part(IMAGES[0])]}]},
            "inputs[0]",
            "maximum context length is 128 tokens",
        ),
        ({"images": [uri(IMAGES[0])] * 4}, None, "at most 3"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(
    client: httpx.AsyncClient, body: dict[str, Any], param: str | None, problem: str
) -> None:
    status, error = await refused(client, "/v2/embed", model=MODEL, **body)
    assert status in (400, 413)
    assert problem in error["message"]
    assert param is None or error["param"] == param


async def test_a_model_for_texts_takes_no_images(nats_server: Server, redis_server: Server) -> None:
    buses = bus_settings_of(nats_server), redis_settings_of(redis_server)
    image = uri(IMAGES[0])
    async with (
        PoolMesh(*buses, "embed") as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        for fields in ({"images": [image]}, {"inputs": [{"content": [part(IMAGES[0])]}]}):
            status, error = await refused(client, "/v2/embed", model=mesh.model, **fields)
            assert status == 400
            assert "takes no images" in error["message"]
    card = {"takes_images": True}
    async with (
        PoolMesh(*buses, "embed", card=card) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        mesh.tokenizer.prompts = {"query": "query: "}
        status, error = await refused(
            client, "/v2/embed", model=mesh.model, images=[image], input_type="search_query"
        )
        assert status == 400
        assert "send input_type image" in error["message"]


async def test_a_model_of_token_embeddings_has_none_for_cohere(
    nats_server: Server, redis_server: Server
) -> None:
    buses = bus_settings_of(nats_server), redis_settings_of(redis_server)
    async with (
        PoolMesh(*buses, "token_embed", card={"takes_images": True}) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        status, error = await refused(
            client, "/v2/embed", model=mesh.model, images=[uri(IMAGES[0])], input_type="image"
        )
        assert status == 400
        assert error["message"].endswith("does not have the task embed; its tasks: token_embed")
