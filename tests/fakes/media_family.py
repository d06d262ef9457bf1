"""MediaFamily: a tiny checkpoint that takes media, all that reads it, and transformers' own model.

Its checks are those that every kind of media has to pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from PIL import Image

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.images import picture
from tests.fakes.models import generated
from tests.fakes.recordings import tones
from tests.fakes.videos import pictures, video_file
from tokenmesh.services.mm_encoder_svc.batcher import Features
from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
from tokenmesh.services.mm_encoder_svc.tower import Tower, load_tower
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.services.tokenizer_svc.media.audio_file import Samples
from tokenmesh.services.tokenizer_svc.media.media_model import MediaModel, StoredItem, media_model
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor, PreparedItem
from tokenmesh.services.tokenizer_svc.media.video_file import VideoLimits, open_video
from tokenmesh.shared.config.model import EncoderSettings, MediaSettings, ModelSettings
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import IMAGE
from tokenmesh.shared.tensor_blob import decode_named

NUM_TOKENS = 32
VIDEO_LIMITS = VideoLimits(max_s=60.0, max_pixels=10**6, max_frames=64, max_total_pixels=10**6)
Items = tuple[tuple[str, int], ...]
"""Kinds and seeds, in the order of the prompt."""


def image(seed: int) -> Image.Image:
    return picture(seed, *((37, 52), (60, 24), (52, 37))[seed % 3])


def recording(seed: int) -> Samples:
    """One of them is longer than a window of the families that have several."""
    return tones((0.83, 1.7, 2.36)[seed % 3], seed=seed)


@cache
def video(seed: int) -> bytes:
    """Files of 1 to 2 seconds and two sizes. libx264 does not write the same bytes each time."""
    size = ((48, 32), (32, 56))[seed % 2]
    return video_file(pictures(8 + 3 * seed, *size, seed=seed), fps=8)


def several(kind: str, *seeds: int) -> Items:
    """Several items of one kind."""
    return tuple((kind, seed) for seed in seeds)


def frames_of(processor: ItemProcessor, data: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features of a video's frames by our rules."""
    assert processor.frames is not None
    with open_video(data, VIDEO_LIMITS) as opened:
        return processor.frames.features(opened, options, VIDEO_LIMITS)


def made_of(videos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the features of several videos as transformers' video processor returns them."""
    names = ("pixel_values_videos", "video_grid_thw")
    joined = {name: numpy.concatenate([each[name] for each in videos]) for name in names}
    return {**joined, "video_metadata": [each["video_metadata"][0] for each in videos]}


@dataclass(eq=False)
class MediaFamily(ABC):
    """One checkpoint."""

    kind: ClassVar[str] = IMAGE
    """The kind of the items in the tests of all families."""
    kind_names: ClassVar[Mapping[str, str]] = {}
    """Kinds of the tests that are of another kind for the services."""

    name: str
    directory: Path
    media: MediaModel
    tower: Tower
    tokenizer: Any
    model: Any
    driver: EngineDriver

    @classmethod
    def parts(cls, directory: Path, **driver: Any) -> dict[str, Any]:
        """Return the fields that every family has; `driver`: settings of the engine."""
        settings = ModelSettings(model=str(directory))
        loaded, found = load_model(settings), find_tower(str(directory), None)
        media = media_model(loaded, settings, MediaSettings())
        assert media is not None
        assert found is not None
        return {
            "directory": directory,
            "media": media,
            "tower": load_tower(found, "float32", EncoderSettings(device="cpu")),
            "tokenizer": loaded.tokenizer,
            "driver": EngineDriver(directory, **{"max_num_batched_tokens": 256, **driver}),
        }

    @abstractmethod
    def placeholder(self, kind: str) -> str:
        """Return the text that a chat template writes for an item."""

    @abstractmethod
    def prepare(self, kind: str, seed: int) -> PreparedItem:
        """An item as the tokenizer service prepares it."""

    @abstractmethod
    def their_inputs(self, items: Items) -> dict[str, Any]:
        """Return the inputs that transformers' processor makes of all items at once."""

    def text(self, items: Items) -> str:
        parts = [f"{self.placeholder(kind)} number {seed}\n" for kind, seed in items]
        return "".join(["The quick ", *parts, f"fox {len(items)}"])

    @cache  # noqa: B019
    def prepared(self, kind: str, seed: int) -> PreparedItem:
        return self.prepare(kind, seed)

    @cache  # noqa: B019
    def job(self, items: Items) -> Job:
        stored = [
            StoredItem(
                f"{kind} {seed}",
                BlobKey("f"),
                self.prepared(kind, seed).prepared,
                self.kind_names.get(kind, kind),
            )
            for kind, seed in items
        ]
        text, stored = self.media.inserted(self.text(items), stored)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        prompt, media = self.media.expanded(ids, stored)
        embeddings = {}
        for (kind, seed), item in zip(items, media, strict=True):
            tensors = decode_named(self.prepared(kind, seed).features)
            features = Features(item.kind, tensors, item.num_embeddings)
            self.tower.check(features)
            (embeddings[item.content_hash],) = self.tower.encode([features])
        return Job(prompt, greedy(NUM_TOKENS), media=media, embeddings=embeddings)

    def items(self, *seeds: int) -> Items:
        """Several items of its kind."""
        return several(self.kind, *seeds)

    def jobs(self, prompts: Sequence[Items]) -> list[Job]:
        return [self.job(items) for items in prompts]

    @cache  # noqa: B019
    def expected(self, items: Items) -> tuple[list[int], list[int]]:
        """The ids that transformers' processor makes and those that its model generates."""
        return generated(self.model, self.their_inputs(items), NUM_TOKENS)

    def answers(self, prompts: Sequence[Items]) -> list[list[int]]:
        """The tokens that transformers generates."""
        return [self.expected(items)[1] for items in prompts]

    def check_answers(self, prompts: Sequence[Items]) -> None:
        """Prompts and answers are those of transformers, and depend on the items."""
        jobs, expected = self.jobs(prompts), self.answers(prompts)
        assert [list(job.prompt) for job in jobs] == [self.expected(each)[0] for each in prompts]
        assert self.driver.again().tokens(jobs) == expected
        assert len({tuple(tokens) for tokens in expected}) == len(jobs)

    def check_chunks(self, prompts: Sequence[Items], chunk: int) -> None:
        """Chunks of prompts end anywhere, while other rows decode."""
        driver = self.driver.again(max_num_batched_tokens=chunk)
        assert driver.tokens(self.jobs(prompts), steps_between=2) == self.answers(prompts)

    def check_borders(self, items: Items) -> None:
        """A chunk ends at each border of an item."""
        job, expected = self.job(items), self.answers([items])
        borders = {place for item in job.media for place in (item.offset, item.end)}
        for border in sorted(borders):
            assert self.driver.again(max_num_batched_tokens=border).tokens([job]) == expected

    def check_prefix_hits(self, items: Items, others: Items) -> None:
        """Equal prompts are computed once; `others` in the same places share nothing after them."""
        driver, job, (expected,) = self.driver.again(), self.job(items), self.answers([items])
        first, again = (driver.run([job])[0] for _ in range(2))
        assert first.token_ids == again.token_ids == expected
        if not driver.model.runner.has_states:
            assert again.num_cached >= len(job.prompt) - 2 * driver.settings.block_size
        assert driver.tokens([self.job(others)]) == self.answers([others])

    def check_resumed(self, items: Items) -> None:
        """A stream goes on from the tokens that another worker has generated."""
        job, (whole,) = self.job(items), self.answers([items])
        rest = Job(job.prompt, job.sampling, whole[:7], job.media, job.embeddings)
        (outcome,) = self.driver.again().run([rest])
        assert outcome.token_ids == whole

    def check_preempted(self, prompts: Sequence[Items], num_blocks: int) -> int:
        """Streams lose their blocks and are computed again; returns how often."""
        outcomes = self.driver.again(num_blocks=num_blocks).run(self.jobs(prompts))
        assert [outcome.token_ids for outcome in outcomes] == self.answers(prompts)
        return sum(outcome.num_preemptions for outcome in outcomes)

    def least_blocks(self, prompts: Sequence[Items]) -> int:
        """Too few for all prompts with their answers at a time."""
        size = self.driver.settings.block_size
        return 2 + sum(-(-len(job.prompt) // size) for job in self.jobs(prompts))

    def log_probabilities(self, items: Items) -> torch.Tensor:
        """[prompt, vocabulary] by transformers."""
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        with torch.inference_mode():
            logits: torch.Tensor = self.model(**self.their_inputs(items)).logits[0]
        return logits.log_softmax(-1)

    def check_logits(self, items: Items, atol: float) -> None:
        """Log-probabilities of the prompt are near those of transformers."""
        job, wanted = (
            self.job(items),
            type(greedy(1))(
                seed=0,
                max_tokens=1,
                temperature=0.0,
                ignore_eos=True,
                logprobs=5,
                prompt_logprobs=1,
            ),
        )
        one = Job(job.prompt, wanted, media=job.media, embeddings=job.embeddings)
        (outcome,) = self.driver.again(enable_prefix_caching=False).run([one])
        theirs = self.log_probabilities(items)
        assert outcome.prompt_logprobs is not None
        for place, entry in enumerate(outcome.prompt_logprobs[1:]):
            assert entry is not None
            assert abs(entry.logprob - float(theirs[place, job.prompt[place + 1]])) <= atol
