"""Models that take images: the processor, the tower and the engine together, as transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.images import picture
from tests.fakes.media_models import MEDIA, media_checkpoint, oracle
from tokenmesh.services.mm_encoder_svc.batcher import Features
from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
from tokenmesh.services.mm_encoder_svc.tower import Tower, load_tower
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.services.tokenizer_svc.media.processor import PreparedItem
from tokenmesh.services.tokenizer_svc.media.vision import StoredItem, VisionModel, vision_model
from tokenmesh.shared.config.model import EncoderSettings, MediaSettings, ModelSettings
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.tensor_blob import TensorBlob, decode_named

NUM_TOKENS = 32
FAST = ("qwen3_vl", "gemma3")
FAMILIES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MEDIA]
PROMPTS: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "three": (1, 2, 3),
    "text": (),
    "again": (2, 2),
}
"""Images of each prompt by their seeds."""


@dataclass(eq=False)
class Family:
    """A checkpoint, all that reads it, and transformers' own model."""

    name: str
    directory: Path
    vision: VisionModel
    tower: Tower
    tokenizer: Any
    model: Any
    driver: EngineDriver

    def text(self, seeds: Sequence[int]) -> str:
        parts = [f"{MEDIA[self.name].placeholder} picture {seed}\n" for seed in seeds]
        return "".join(["The quick ", *parts, f"fox {len(seeds)}"])

    @cache  # noqa: B019
    def prepared(self, seed: int) -> PreparedItem:
        return self.vision.processor.image(image(seed), {})

    def stored(self, seed: int) -> StoredItem:
        return StoredItem(f"image {seed}", BlobKey("f"), self.prepared(seed).prepared)

    @cache  # noqa: B019
    def job(self, seeds: tuple[int, ...]) -> Job:
        images = [self.stored(seed) for seed in seeds]
        text = self.vision.inserted(self.text(seeds), images)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        prompt, items = self.vision.expanded(ids, images)
        embeddings = {}
        for seed, item in zip(seeds, items, strict=True):
            tensors = decode_named(self.prepared(seed).features)
            features = Features("image", tensors, item.num_embeddings)
            self.tower.check(features)
            (embeddings[item.content_hash],) = self.tower.encode([features])
        return Job(prompt, greedy(NUM_TOKENS), media=items, embeddings=embeddings)

    @cache  # noqa: B019
    def expected(self, seeds: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """The ids that transformers' processor makes and those that its model generates."""
        inputs = their_inputs(self, seeds)
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        with torch.inference_mode():
            ids = self.model.generate(
                **inputs,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        prompt = inputs["input_ids"][0].tolist()
        return prompt, ids[0, len(prompt) :].tolist()


def image(seed: int) -> Image.Image:
    return picture(seed, *((37, 52), (60, 24), (52, 37))[seed % 3])


def their_inputs(family: Family, seeds: tuple[int, ...]) -> Any:
    """What transformers' processor makes of all images of a prompt at once."""
    processor = family.vision.processor._processor
    images = {"images": [[image(seed) for seed in seeds]]} if seeds else {}
    found = processor(text=[family.text(seeds)], return_tensors="np", **images)
    return {name: torch.tensor(value) for name, value in found.items()}


_loaded: dict[str, Family] = {}


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name: str = request.param
    if name not in _loaded:
        _loaded.clear()
        directory = media_checkpoint(tmp_path_factory.mktemp(name), name)
        settings = ModelSettings(model=str(directory))
        loaded = load_model(settings)
        vision = vision_model(loaded, settings, MediaSettings())
        found = find_tower(str(directory), None)
        assert vision is not None
        assert found is not None
        tower = load_tower(found, "float32", EncoderSettings(device="cpu"))
        driver = EngineDriver(directory, max_num_batched_tokens=256)
        model = oracle(directory, name)
        _loaded[name] = Family(name, directory, vision, tower, loaded.tokenizer, model, driver)
    return _loaded[name]


each_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)


@each_family
def test_prompts_are_those_of_the_processor_of_transformers(family: Family) -> None:
    for seeds in PROMPTS.values():
        assert list(family.job(seeds).prompt) == family.expected(seeds)[0]


@each_family
def test_answers_are_those_of_transformers(family: Family) -> None:
    jobs = [family.job(seeds) for seeds in PROMPTS.values()]
    expected = [family.expected(seeds)[1] for seeds in PROMPTS.values()]
    assert family.driver.again().tokens(jobs) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(jobs)


@each_family
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks_may_end_anywhere_that_the_model_allows(family: Family, chunk: int) -> None:
    if family.driver.model.media.sees_ahead:
        chunk += 15  # no image fits a shorter one
    driver = family.driver.again(max_num_batched_tokens=chunk)
    jobs = [family.job(PROMPTS[name]) for name in ("three", "text", "one")]
    expected = [family.expected(PROMPTS[name])[1] for name in ("three", "text", "one")]
    assert driver.tokens(jobs, steps_between=2) == expected


@each_family
def test_an_image_is_computed_once_for_equal_prompts(family: Family) -> None:
    driver = family.driver.again()
    seeds = PROMPTS["three"]
    first, again = (driver.run([family.job(seeds)])[0] for _ in range(2))
    assert first.token_ids == again.token_ids == family.expected(seeds)[1]
    if not family.driver.model.runner.has_states:
        assert again.num_cached > 48
    # other images in the same places share nothing from the first of them on
    others = (2, 1, 3)
    (other,) = driver.run([family.job(others)])
    assert other.token_ids == family.expected(others)[1]


@each_family
def test_a_stream_goes_on_from_its_tokens_and_after_preemption(family: Family) -> None:
    seeds = PROMPTS["three"]
    whole = family.expected(seeds)[1]
    job = family.job(seeds)
    rest = Job(job.prompt, job.sampling, whole[:7], job.media, job.embeddings)
    (outcome,) = family.driver.again().run([rest])
    assert outcome.token_ids == whole
    jobs = [family.job(PROMPTS[name]) for name in ("three", "again", "one")]
    num_blocks = -(-(len(job.prompt) + NUM_TOKENS) // family.driver.settings.block_size) + 6
    windows = len(family.driver.model.runner.windows)
    outcomes = family.driver.again(num_blocks=num_blocks * windows).run(jobs)
    assert [outcome.token_ids for outcome in outcomes] == [
        family.expected(PROMPTS[name])[1] for name in ("three", "again", "one")
    ]


@each_family
def test_logits_are_near_those_of_transformers(family: Family) -> None:
    seeds = PROMPTS["three"]
    job = family.job(seeds)
    sampling = greedy(1)
    wanted = type(sampling)(
        seed=0, max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=3
    )
    (outcome,) = family.driver.again(enable_prefix_caching=False).run(
        [Job(job.prompt, wanted, media=job.media, embeddings=job.embeddings)]
    )
    with torch.inference_mode():
        logits = family.model(**their_inputs(family, seeds)).logits[0]
    theirs = logits.log_softmax(-1)
    assert outcome.prompt_logprobs is not None
    for place, entry in enumerate(outcome.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.logprob == pytest.approx(
            float(theirs[place, job.prompt[place + 1]]), abs=1e-3 if _is_state(family) else 3e-4
        )


def _is_state(family: Family) -> bool:
    return bool(family.driver.model.runner.has_states)


@each_family
def test_media_that_do_not_fit_fail_their_request_alone(family: Family) -> None:
    good = family.job((1,))
    short = TensorBlob("float32", (2, 64), bytes(2 * 64 * 4))
    bad = Job(good.prompt, good.sampling, media=good.media, embeddings={"image 1": short})
    outcomes = family.driver.again().run([good, bad])
    assert outcomes[0].token_ids == family.expected((1,))[1]
    assert "shape" in (outcomes[1].error or "")
