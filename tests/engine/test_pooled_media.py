"""Images in prompts that are answered with numbers: in chunks, cached, preempted, among texts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tests.engine.test_media_families import ImageFamily, image_family
from tests.fakes.pool_driver import EMBED, PoolDriver, numbers_of
from tests.fakes.tokenizers import write_json
from tokenmesh.engine.request.request import Request
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.messages.pooling import PoolingParams
from tokenmesh.shared.tensor_blob import TensorBlob

NAME = "qwen3_vl"
TOKENS = PoolingParams(task="token_embed", use_activation=False)
PROMPTS = ((1,), (), (2, 1, 3), (1, 2))
"""Images of each prompt by their seeds."""


@dataclass
class Embedder:
    """A checkpoint that reads images, served for embeddings."""

    family: ImageFamily
    driver: PoolDriver

    def request(self, seeds: tuple[int, ...], params: PoolingParams = EMBED) -> Request:
        job = self.family.job(self.family.items(*seeds))
        return self.driver.request(
            job.prompt, params, media=job.media, embeddings=dict(job.embeddings)
        )

    @torch.inference_mode()
    def states(self, seeds: tuple[int, ...]) -> torch.Tensor:
        """[tokens, hidden] by transformers, from the text and the images."""
        inputs, model = self.family.their_inputs(self.family.items(*seeds)), self.family.model.model
        model.rope_deltas = None
        states: torch.Tensor = model(**inputs).last_hidden_state[0]
        return states


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    family = image_family(tmp_path_factory.mktemp(NAME), NAME)
    served = {"runner": "pooling", "max_model_len": 256}
    return Embedder(family, PoolDriver(family.directory, model=served, num_gpu_blocks_override=64))


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
    job = embedder.family.job(embedder.family.items(1))
    ((key, blob),) = job.embeddings.items()
    short = TensorBlob(blob.dtype, (1, blob.shape[1]), blob.data[: len(blob.data) // blob.shape[0]])
    wrong = embedder.driver.request(job.prompt, media=job.media, embeddings={key: short})
    endings = driver.end([wrong, embedder.request((2,))])
    assert [each.reason for each in endings] == ["error", "stop"]
    assert endings[0].error is not None
    assert "have shape" in endings[0].error.message


def test_other_retrievers_of_images_are_refused_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["ColPaliForRetrieval"], "model_type": "colpali"}
    write_json(tmp_path / "config.json", config)
    with pytest.raises(CheckpointError, match="ColPaliForRetrieval, which is not supported"):
        PoolDriver(tmp_path)
