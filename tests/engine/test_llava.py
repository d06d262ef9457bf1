"""Images in prompts: embeddings take the place of placeholders, at their positions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from tests.fakes.cuda_driver import CudaDriver
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.llava import IMAGE_SIZE, NUM_PATCHES, llava
from tests.fakes.models import randomized
from tests.fakes.reference_layers import reference_layers
from tests.fakes.tiny import prompt_of
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import IMAGE, MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.tensor_blob import TensorBlob

IMAGE_ID = 3
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = llava(tmp_path_factory.mktemp("llava"))
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    randomized(model).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Any:
    return LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()


def pixels_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)


def prompt_with(images: int, seed: int) -> list[int]:
    """Text, then for each image its placeholders and some text."""
    prompt = [token + 10 for token in prompt_of(6, seed=seed)]
    for image in range(images):
        prompt += [IMAGE_ID] * NUM_PATCHES
        prompt += [token + 10 for token in prompt_of(3, seed=100 + image)]
    return prompt


def job_of(oracle: Any, images: list[int], seed: int) -> Job:
    """A job whose embeddings transformers' own tower has computed."""
    prompt = prompt_with(len(images), seed)
    starts = [i for i, t in enumerate(prompt) if t == IMAGE_ID and prompt[i - 1] != IMAGE_ID]
    media, embeddings = [], {}
    for image, offset in zip(images, starts, strict=True):
        with torch.no_grad():
            features = oracle.get_image_features(pixel_values=pixels_of(image)).pooler_output[0]
        key = f"hash{image}"
        embeddings[key] = TensorBlob("float32", tuple(features.shape), features.numpy().tobytes())
        media.append(
            MediaItem(
                kind="image",
                content_hash=key,
                offset=offset,
                length=NUM_PATCHES,
                pixels=BlobKey("pixels"),
            )
        )
    return Job(prompt, greedy(NUM_TOKENS), media=media, embeddings=embeddings)


def expected(oracle: Any, images: list[int], seed: int) -> list[int]:
    prompt = prompt_with(len(images), seed)
    pixels = {}
    if images:
        pixels["pixel_values"] = torch.cat([pixels_of(image) for image in images])
    ids = oracle.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        **pixels,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_placeholders_need_not_be_in_the_vocabulary(
    directory: Path, oracle: Any, native: bool
) -> None:
    job = job_of(oracle, [1, 2], seed=3)
    outside = [1 << 20 if token == IMAGE_ID else token for token in job.prompt]
    sampling = SamplingParams(
        seed=0, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, repetition_penalty=1.3
    )
    driver = EngineDriver(directory, native_kernels=native)
    # a token that the prompt has besides, so that penalties see the same set of tokens
    inside = [job.prompt[0] if token == IMAGE_ID else token for token in job.prompt]
    expected = driver.tokens([replace(job, prompt=inside, sampling=sampling)])
    assert driver.tokens([replace(job, prompt=outside, sampling=sampling)]) == expected


def test_the_device_runner_takes_placeholders_outside_the_vocabulary(
    directory: Path, oracle: Any
) -> None:
    job = job_of(oracle, [1], seed=3)
    outside = [1 << 20 if token == IMAGE_ID else token for token in job.prompt]
    with torch.inference_mode(), reference_layers():
        driver = CudaDriver(directory)
        tokens = driver.tokens([job, replace(job, prompt=outside)])
    assert tokens == [expected(oracle, [1], seed=3)] * 2


@pytest.mark.parametrize(
    "chunk",
    [1, pytest.param(3, marks=pytest.mark.slow), 7, pytest.param(16, marks=pytest.mark.slow), 1024],
)
@pytest.mark.parametrize("images", [[1], [1, 2, 3]], ids=["one image", "three images"])
def test_images_match_transformers(
    directory: Path, oracle: Any, images: list[int], chunk: int
) -> None:
    driver = EngineDriver(directory, max_num_batched_tokens=chunk)
    assert driver.model.media.kinds == {IMAGE}
    outcome = driver.tokens([job_of(oracle, images, seed=1)])
    assert outcome == [expected(oracle, images, seed=1)]
    assert outcome != [expected(oracle, images[::-1] if len(images) > 1 else [9], seed=1)]


def test_images_mix_with_text_only_requests(directory: Path, oracle: Any) -> None:
    batch = [([1], 1), ([], 2), ([1, 2, 3], 3), ([], 4), ([2], 5)]
    driver = EngineDriver(directory, long_prefill_token_threshold=16)
    outcome = driver.tokens([job_of(oracle, images, seed) for images, seed in batch])
    assert outcome == [expected(oracle, images, seed) for images, seed in batch]


def test_missing_or_misshapen_embeddings_fail_their_request_alone(
    directory: Path, oracle: Any
) -> None:
    good, bad = job_of(oracle, [1], seed=1), job_of(oracle, [2], seed=2)
    short = TensorBlob("float32", (2, 32), bytes(2 * 32 * 4))
    broken = torch.full((NUM_PATCHES, 32), float("nan")).numpy().tobytes()
    infinite = TensorBlob("float32", (NUM_PATCHES, 32), broken)
    jobs = [
        good,
        Job(bad.prompt, bad.sampling, media=bad.media),
        Job(bad.prompt, bad.sampling, media=bad.media, embeddings={"hash2": short}),
        Job(bad.prompt, bad.sampling, media=bad.media, embeddings={"hash2": infinite}),
    ]
    outcomes = EngineDriver(directory).run(jobs)
    assert outcomes[0].token_ids == expected(oracle, [1], seed=1)
    errors = [outcome.error or "" for outcome in outcomes]
    assert errors[0] == ""
    for error, words in zip(errors[1:], ("missing", "shape", "not finite"), strict=True):
        assert words in error
