"""Models that see or hear: the processor, the tower and the engine together, as transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.audio_models import AUDIO as AUDIO_FAKES
from tests.fakes.audio_models import audio_checkpoint, audio_oracle, their_inputs, use_numpy
from tests.fakes.engine_driver import Job
from tests.fakes.media_family import (
    NUM_TOKENS,
    VIDEO_LIMITS,
    Items,
    MediaFamily,
    frames_of,
    image,
    made_of,
    recording,
    several,
    video,
)
from tests.fakes.media_models import MEDIA, media_checkpoint, oracle
from tests.fakes.recordings import tones
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor, PreparedItem
from tokenmesh.services.tokenizer_svc.media.recordings import RecordingProcessor
from tokenmesh.services.tokenizer_svc.media.video_file import open_video
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.media import AUDIO, IMAGE, VIDEO
from tokenmesh.shared.tensor_blob import TensorBlob

pytestmark = pytest.mark.timeout(180)
FAST = ("qwen3_vl", "gemma3", "qwen2_audio")
ONE, TWO, THREE = (several(IMAGE, *seeds) for seeds in ((1,), (1, 2), (1, 2, 3)))
TEXT = several(IMAGE)


@dataclass(eq=False)
class ImageFamily(MediaFamily):
    """A model that takes images, and some of which take videos."""

    processor: ItemProcessor
    options: Mapping[str, Any] = field(default_factory=lambda: {"fps": 3})
    """Options of videos."""

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


@dataclass(eq=False)
class AudioFamily(MediaFamily):
    """A model that takes recordings."""

    kind = AUDIO
    processor: RecordingProcessor

    def placeholder(self, kind: str) -> str:
        return AUDIO_FAKES[self.name].placeholder

    def prepare(self, kind: str, seed: int) -> PreparedItem:
        return self.processor(recording(seed))

    def their_inputs(self, items: Items) -> dict[str, Any]:
        recordings = [recording(seed) for _, seed in items]
        return dict(their_inputs(self.directory, self.name, self.text(items), recordings))


def image_family(directory: Path, name: str) -> ImageFamily:
    media_checkpoint(directory, name)
    parts = ImageFamily.parts(directory, lora={"enable_lora": True})
    processor = ItemProcessor(directory)
    return ImageFamily(name=name, model=oracle(directory, name), processor=processor, **parts)


def audio_family(directory: Path, name: str) -> AudioFamily:
    audio_checkpoint(directory, name)
    parts, processor = AudioFamily.parts(directory), RecordingProcessor(directory)
    use_numpy(processor._mel.extractor)
    return AudioFamily(name=name, model=audio_oracle(directory, name), processor=processor, **parts)


_loaded: dict[str, MediaFamily] = {}


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MediaFamily:
    name: str = request.param
    if name not in _loaded:
        # three take turns in `make test`
        if len(_loaded) > 2:
            _loaded.clear()
        make = image_family if name in MEDIA else audio_family
        _loaded[name] = make(tmp_path_factory.mktemp(name), name)
    return _loaded[name]


def families(*names: str) -> pytest.MarkDecorator:
    values = [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in names]
    return pytest.mark.parametrize("family", values, indirect=True)


each_family = families(*MEDIA, *AUDIO_FAKES)
each_that_sees = families(*MEDIA)
each_that_hears = families(*AUDIO_FAKES)


@each_family
def test_prompts_and_answers_are_those_of_transformers(family: MediaFamily) -> None:
    items = family.items
    family.check_answers([items(1), items(1, 2, 3), items(), items(2, 2)])


@each_family
@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(16, marks=pytest.mark.slow)]
)
def test_chunks_may_end_anywhere_that_the_model_allows(family: MediaFamily, chunk: int) -> None:
    # where tokens of an image see each other, none fits a shorter one
    least = 15 if family.driver.model.media.sees_ahead else 0
    family.check_chunks([family.items(1, 2, 3), (), family.items(1)], chunk + least)


@each_that_hears
def test_chunks_may_end_at_each_border_of_a_recording(family: AudioFamily) -> None:
    family.check_borders(family.items(1, 2, 3))


@each_family
def test_an_item_is_computed_once_for_equal_prompts(family: MediaFamily) -> None:
    family.check_prefix_hits(family.items(1, 2, 3), family.items(2, 1, 3))


@each_family
def test_a_stream_goes_on_from_its_tokens_and_after_preemption(family: MediaFamily) -> None:
    three = family.items(1, 2, 3)
    family.check_resumed(three)
    family.check_preempted([three, family.items(2, 2), family.items(1)], few_blocks(family, three))


@each_that_hears
def test_recordings_that_the_model_cannot_hear_are_refused(family: AudioFamily) -> None:
    with pytest.raises(InvalidInput, match=r"at least 0\.1 s"):
        family.processor(tones(0.05))
    with pytest.raises(InvalidInput, match=r"at most|context holds 1024"):
        family.processor(tones(170))
    shortest = family.processor(tones(0.1)).prepared
    assert shortest.runs[0] >= 1


def few_blocks(family: MediaFamily, items: Items) -> int:
    """For one stream and a part of another one, in all groups of windows."""
    driver, job = family.driver, family.job(items)
    num_blocks = -(-(len(job.prompt) + NUM_TOKENS) // driver.settings.block_size) + 6
    return num_blocks * len(driver.model.runner.windows)


@each_that_sees
def test_logits_are_near_those_of_transformers(family: ImageFamily) -> None:
    family.check_logits(THREE, 1e-3 if family.driver.model.runner.has_states else 3e-4)


@each_that_sees
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


@each_that_sees
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
