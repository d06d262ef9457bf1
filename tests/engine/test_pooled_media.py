"""Images in prompts that are answered with numbers: in chunks, cached, preempted, among texts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tests.fakes.images import picture
from tests.fakes.media_models import MEDIA, media_checkpoint, oracle
from tests.fakes.pool_driver import EMBED, PoolDriver, numbers_of
from tests.fakes.tokenizers import write_json
from tokenmesh.services.mm_encoder_svc.batcher import Features
from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
from tokenmesh.services.mm_encoder_svc.tower import load_tower
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.services.tokenizer_svc.media.media_model import StoredItem, media_model
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor
from tokenmesh.services.worker_svc.engine.request import Request
from tokenmesh.shared.config.model import EncoderSettings, MediaSettings, ModelSettings
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.pooling import PoolingParams
from tokenmesh.shared.tensor_blob import TensorBlob, decode_named

NAME = "qwen3_vl"
TOKENS = PoolingParams(task="token_embed", use_activation=False)
PROMPTS = ((1,), (), (2, 1, 3), (1, 2))
"""Images of each prompt by their seeds."""


class Embedder:
    """A checkpoint that reads images, served for embeddings, and transformers' model of it."""

    def __init__(self, directory: Path) -> None:
        media_checkpoint(directory, NAME)
        settings = ModelSettings(model=str(directory))
        self.loaded = load_model(settings)
        media, tower = (
            media_model(self.loaded, settings, MediaSettings()),
            find_tower(str(directory), None),
        )
        assert media is not None
        assert tower is not None
        self.media, self.processor = media, ItemProcessor(directory)
        self.tower = load_tower(tower, "float32", EncoderSettings(device="cpu"))
        self.model = oracle(directory, NAME)
        self.driver = PoolDriver(
            directory,
            model={"runner": "pooling", "max_model_len": 256},
            num_gpu_blocks_override=64,
        )

    def text(self, seeds: tuple[int, ...]) -> str:
        images = [f"{MEDIA[NAME].placeholder} picture {seed}\n" for seed in seeds]
        return "".join(["The quick ", *images, f"fox {len(seeds)}"])

    def prompt(
        self, seeds: tuple[int, ...]
    ) -> tuple[list[int], list[MediaItem], dict[str, TensorBlob]]:
        prepared = [self.processor.image(picture(seed, 37, 52), {}) for seed in seeds]
        stored = [
            StoredItem(f"image {seed}", BlobKey("f"), each.prepared)
            for seed, each in zip(seeds, prepared, strict=True)
        ]
        text, stored = self.media.inserted(self.text(seeds), stored)
        ids = self.loaded.tokenizer.encode(text, add_special_tokens=False).ids
        ids, items = self.media.expanded(ids, stored)
        embeddings = {}
        for item, each in zip(items, prepared, strict=True):
            features = Features("image", decode_named(each.features), item.num_embeddings)
            (embeddings[item.content_hash],) = self.tower.encode([features])
        return ids, items, embeddings

    def request(self, seeds: tuple[int, ...], params: PoolingParams = EMBED) -> Request:
        ids, items, embeddings = self.prompt(seeds)
        return self.driver.request(ids, params, media=items, embeddings=embeddings)

    @torch.inference_mode()
    def states(self, seeds: tuple[int, ...]) -> torch.Tensor:
        """[tokens, hidden] by transformers, from the text and the images."""
        images = {"images": [[picture(seed, 37, 52) for seed in seeds]]} if seeds else {}
        found = self.processor._processor(text=[self.text(seeds)], return_tensors="np", **images)
        inputs: Any = {name: torch.tensor(value) for name, value in found.items()}
        self.model.model.rope_deltas = None
        states: torch.Tensor = self.model.model(**inputs).last_hidden_state[0]
        return states


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return Embedder(tmp_path_factory.mktemp(NAME))


@pytest.mark.parametrize("chunk", [5, 64])
def test_embeddings_of_images_are_those_of_transformers(embedder: Embedder, chunk: int) -> None:
    driver = embedder.driver.again(max_num_batched_tokens=chunk)
    for params in (EMBED, TOKENS):
        requests = [embedder.request(seeds, params) for seeds in PROMPTS]
        assert {each.reason for each in driver.end(requests)} == {"stop"}
        for seeds, request in zip(PROMPTS, requests, strict=True):
            states = embedder.states(seeds)
            expected = states if params is TOKENS else normalize(states[-1], dim=0)
            np.testing.assert_allclose(numbers_of(request), expected.numpy(), atol=5e-5)


def test_equal_images_are_cached_and_other_ones_are_not(embedder: Embedder) -> None:
    driver = embedder.driver.again()
    requests = [embedder.request(seeds) for seeds in ((1, 2), (1, 2), (2, 1))]
    for request in requests:
        driver.end([request])
    cached = [request.place.num_cached or 0 for request in requests]
    assert cached[0] == 0
    assert cached[1] > 16
    assert cached[2] <= 16
    for seeds, request in zip(((1, 2), (1, 2), (2, 1)), requests, strict=True):
        expected = normalize(embedder.states(seeds)[-1], dim=0)
        np.testing.assert_allclose(numbers_of(request), expected.numpy(), atol=5e-5)


def test_a_preempted_prompt_has_its_images_again(embedder: Embedder) -> None:
    driver = embedder.driver.again(enable_prefix_caching=False, max_num_batched_tokens=16)
    requests = [embedder.request(seeds, TOKENS) for seeds in PROMPTS]
    for request in requests:
        driver.engine.add(request)
    driver.engine.step()
    driver.engine._scheduler.preempt(requests[0])
    while driver.engine.has_work:
        driver.engine.step()
    for seeds, request in zip(PROMPTS, requests, strict=True):
        expected = embedder.states(seeds).numpy()
        np.testing.assert_allclose(numbers_of(request), expected, atol=5e-5)


def test_embeddings_of_the_wrong_shape_fail_their_prompt_alone(embedder: Embedder) -> None:
    driver = embedder.driver.again()
    ids, items, embeddings = embedder.prompt((1,))
    blob = next(iter(embeddings.values()))
    short = TensorBlob(blob.dtype, (1, blob.shape[1]), blob.data[: len(blob.data) // blob.shape[0]])
    wrong = embedder.driver.request(ids, media=items, embeddings={items[0].content_hash: short})
    endings = driver.end([wrong, embedder.request((2,))])
    assert [each.reason for each in endings] == ["error", "stop"]
    assert endings[0].error is not None
    assert "have shape" in endings[0].error.message


def test_other_retrievers_of_images_are_refused_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["ColPaliForRetrieval"], "model_type": "colpali"}
    write_json(tmp_path / "config.json", config)
    with pytest.raises(CheckpointError, match="ColPaliForRetrieval, which is not supported"):
        PoolDriver(tmp_path)
