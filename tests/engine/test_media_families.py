"""Models that take images: the processor, the tower and the engine together, as transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.engine_driver import Job
from tests.fakes.media_family import (
    NUM_TOKENS,
    VIDEO_LIMITS,
    Items,
    MediaFamily,
    frames_of,
    image,
    made_of,
    several,
    video,
)
from tests.fakes.media_models import MEDIA, media_checkpoint, oracle
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor, PreparedItem
from tokenmesh.services.tokenizer_svc.media.video_file import open_video
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.media import IMAGE, VIDEO
from tokenmesh.shared.tensor_blob import TensorBlob

pytestmark = pytest.mark.timeout(180)
FAST = ("qwen3_vl", "gemma3")
FAMILIES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MEDIA]
ONE, TWO, THREE = (several(IMAGE, *seeds) for seeds in ((1,), (1, 2), (1, 2, 3)))
TEXT, AGAIN = several(IMAGE), several(IMAGE, 2, 2)


@dataclass(eq=False)
class ImageFamily(MediaFamily):
    """A model that takes images, and some of which take videos."""

    processor: ItemProcessor
    options: Mapping[str, Any] = field(default_factory=lambda: {"fps": 3})
    """Of videos."""

    def placeholder(self, kind: str) -> str:
        fake = MEDIA[self.name]
        return fake.placeholder if kind == IMAGE else fake.video_placeholder

    def prepare(self, kind: str, seed: int) -> PreparedItem:
        if kind == IMAGE:
            return self.processor.image(image(seed), {})
        with open_video(video(seed), VIDEO_LIMITS) as opened:
            return self.processor.video(opened, self.options, VIDEO_LIMITS)

    def their_inputs(self, items: Items) -> dict[str, Any]:
        """With our patches of the videos."""
        named: dict[str, Any] = {}
        if images := [image(seed) for kind, seed in items if kind == IMAGE]:
            named["images"] = [images]
        if files := [video(seed) for kind, seed in items if kind == VIDEO]:
            found = [frames_of(self.processor, file, self.options) for file in files]
            self.processor._made.found = made_of(found)
            named["videos"] = [numpy.zeros((1, 2, 2, 3), numpy.uint8) for _ in files]
        processor = self.processor._processor
        made = processor(text=[self.text(items)], return_tensors="np", **named)
        tensors = {name: torch.tensor(value) for name, value in made.items()}
        if "second_per_grid_ts" in tensors:  # as with return_tensors="pt"
            tensors["second_per_grid_ts"] = tensors["second_per_grid_ts"].float()
        return tensors


_loaded: dict[str, ImageFamily] = {}


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageFamily:
    name: str = request.param
    if name not in _loaded:
        # two take turns in `make test`
        if len(_loaded) > 1:
            _loaded.clear()
        directory = media_checkpoint(tmp_path_factory.mktemp(name), name)
        parts = ImageFamily.parts(directory, lora={"enable_lora": True})
        model, processor = oracle(directory, name), ItemProcessor(directory)
        _loaded[name] = ImageFamily(name=name, model=model, processor=processor, **parts)
    return _loaded[name]


each_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)


@each_family
def test_prompts_and_answers_are_those_of_transformers(family: ImageFamily) -> None:
    family.check_answers([ONE, THREE, TEXT, AGAIN])


@each_family
@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(16, marks=pytest.mark.slow)]
)
def test_chunks_may_end_anywhere_that_the_model_allows(family: ImageFamily, chunk: int) -> None:
    # where tokens of an image see each other, none fits a shorter one
    least = 15 if family.driver.model.media.sees_ahead else 0
    family.check_chunks([THREE, TEXT, ONE], chunk + least)


@each_family
def test_an_image_is_computed_once_for_equal_prompts(family: ImageFamily) -> None:
    family.check_prefix_hits(THREE, several(IMAGE, 2, 1, 3))


@each_family
def test_a_stream_goes_on_from_its_tokens_and_after_preemption(family: ImageFamily) -> None:
    family.check_resumed(THREE)
    family.check_preempted([THREE, AGAIN, ONE], few_blocks(family, THREE))


def few_blocks(family: MediaFamily, items: Items) -> int:
    """For one stream and a part of another one, in all groups of windows."""
    driver, job = family.driver, family.job(items)
    num_blocks = -(-(len(job.prompt) + NUM_TOKENS) // driver.settings.block_size) + 6
    return num_blocks * len(driver.model.runner.windows)


@each_family
def test_logits_are_near_those_of_transformers(family: ImageFamily) -> None:
    family.check_logits(THREE, 1e-3 if family.driver.model.runner.has_states else 3e-4)


@each_family
def test_media_that_do_not_fit_fail_their_request_alone(family: ImageFamily) -> None:
    good = family.job(ONE)
    short = TensorBlob("float32", (2, 64), bytes(2 * 64 * 4))
    bad = Job(good.prompt, good.sampling, media=good.media, embeddings={"image 1": short})
    outcomes = family.driver.again().run([good, bad])
    assert outcomes[0].token_ids == family.expected(ONE)[1]
    assert "shape" in (outcomes[1].error or "")


FORMER_NAMES = (
    (".model.language_model.", ".language_model.model."),
    (".model.language_model.layers.", ".model.layers."),
)
"""As earlier versions of transformers had them."""


@each_family
def test_an_adapter_of_the_language_model_and_images_equal_the_merged_model(
    family: ImageFamily, tmp_path: Path
) -> None:
    merged = oracle(family.directory, family.name)
    paths = [write_adapter(merged, tmp_path / name) for name in ("both", "language")]
    file = paths[1] / "adapter_model.safetensors"
    tensors = load_file(file)
    of_language = {key: each for key, each in tensors.items() if ".language_model." in key}
    save_file(of_language, file)
    read = family.driver.model.adapters.read
    adapter = read(paths[1])
    adapted = replace(family, model=merge(merged, paths[1]))
    plain, driver = family.job(TWO), family.driver.again()
    job = replace(plain, adapter=adapter)
    wanted = [family.expected(TWO)[1], adapted.expected(TWO)[1]]
    assert wanted[0] != wanted[1], "the adapter changes nothing"
    # one after the other: keys of the images without the adapter are there, and are not used
    for each, tokens in zip((plain, job, plain, job), (*wanted, *wanted), strict=True):
        assert driver.tokens([each]) == [tokens]
    assert driver.tokens([job, plain]) == wanted[::-1]
    # Llava never had the second one, and is of the native kind
    for now, former in FORMER_NAMES[: 1 if family.name == "llava" else None]:
        renamed = {key.replace(now, former): each for key, each in of_language.items()}
        if renamed.keys() != of_language.keys():
            save_file(renamed, file)
            assert read(paths[1]).matrices.nbytes == adapter.matrices.nbytes
            if family.name == "qwen2_vl":
                assert driver.tokens([replace(plain, adapter=read(paths[1]))]) == [wanted[1]]
    if len(of_language) < len(tensors):
        with pytest.raises(InvalidInput, match="adapters of towers are not served"):
            read(paths[0])
