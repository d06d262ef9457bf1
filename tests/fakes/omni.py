"""A tiny thinker of Qwen3-Omni in a checkpoint as repositories have it, and transformers' own."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Self

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.fakes.audio_models import use_numpy
from tests.fakes.media_family import (
    VIDEO_LIMITS,
    Items,
    MediaFamily,
    frames_of,
    image,
    made_of,
    recording,
    video,
)
from tests.fakes.media_models import MEDIA, media_checkpoint, oracle
from tests.fakes.recordings import tones
from tests.fakes.tokenizers import write_json
from tokenmesh.services.tokenizer_svc.media.audio_file import Samples
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor, PreparedItem
from tokenmesh.services.tokenizer_svc.media.recordings import RecordingProcessor
from tokenmesh.services.tokenizer_svc.media.video_file import open_video
from tokenmesh.shared.messages.media import AUDIO, IMAGE, VIDEO

NAME: Final = "qwen3_omni_moe_thinker"
FILM: Final = "film"
"""A video with its sound."""
SECONDS: Final = "position_id_per_seconds"
OPTIONS: Final = {"fps": 3, "size": {"shortest_edge": 256, "longest_edge": 2048}}
_ALONE: Final = {"padding": True, "truncation": False}


@dataclass(eq=False)
class Omni(MediaFamily):
    """The checkpoint and what reads it."""

    kind_names: ClassVar[Mapping[str, str]] = {FILM: VIDEO}

    processor: ItemProcessor
    recordings: RecordingProcessor

    @classmethod
    def load(cls, directory: Path, positions_a_second: int = 13) -> Self:
        """Make the checkpoint below a directory."""
        (directory / "thinker").mkdir()
        plain = media_checkpoint(directory / "thinker", NAME)
        config = json.loads((plain / "config.json").read_text())
        write_json(plain / "config.json", {**config, SECONDS: positions_a_second})
        whole = whole_checkpoint(directory / "whole", plain)
        processor, recordings = ItemProcessor(whole), RecordingProcessor(whole)
        use_numpy(processor._processor.feature_extractor)
        use_numpy(recordings._mel.extractor)
        return cls(
            name=NAME,
            model=hear_each_alone(oracle(plain, NAME)),
            processor=processor,
            recordings=recordings,
            **cls.parts(whole, max_num_batched_tokens=512),
        )

    def placeholder(self, kind: str) -> str:
        fake = MEDIA[NAME]
        if kind == AUDIO:
            return fake.audio_placeholder
        return fake.placeholder if kind == IMAGE else fake.video_placeholder

    def film(self, kind: str, seed: int) -> tuple[bytes, Samples | None]:
        """A video file, and its sound where it is a film."""
        return video(seed), sound(seed) if kind == FILM else None

    def prepare(self, kind: str, seed: int) -> PreparedItem:
        if kind == AUDIO:
            return self.recordings(recording(seed))
        if kind == IMAGE:
            return self.processor.image(image(seed), OPTIONS)
        data, heard = self.film(kind, seed)
        with open_video(data, VIDEO_LIMITS) as opened:
            return self.processor.video(opened, OPTIONS, VIDEO_LIMITS, heard)

    def their_inputs(self, items: Items) -> dict[str, Any]:
        """With our patches of the videos, and each recording heard alone."""
        named: dict[str, Any] = {}
        if images := [image(seed) for kind, seed in items if kind == IMAGE]:
            named["images"] = [images]
        films = [(kind, seed) for kind, seed in items if kind in (VIDEO, FILM)]
        if films:
            files = [self.film(*each)[0] for each in films]
            self.processor._made.found = made_of(
                [frames_of(self.processor, file, OPTIONS) for file in files]
            )
            named["videos"] = [numpy.zeros((1, 2, 2, 3), numpy.uint8) for _ in films]
        heard = [(kind, seed) for kind, seed in items if kind in (AUDIO, FILM)]
        if heard:
            named["audio"] = [
                recording(seed) if kind == AUDIO else self.film(kind, seed)[1]
                for kind, seed in heard
            ]
        has_sound = any(kind == FILM for kind, _ in items)
        if has_sound:
            named["load_audio_from_video"] = True
            named["audio_from_video_indices"] = [
                films.index(each) if each[0] == FILM else None for each in heard
            ]
        named[SECONDS] = self.model.config.position_id_per_seconds
        made = self.processor._processor(
            text=[self.text(items)], return_tensors="np", **OPTIONS, **named
        )
        tensors: dict[str, Any] = {name: torch.tensor(value) for name, value in made.items()}
        if heard:
            tensors |= self._alone(named["audio"])
        if "video_second_per_grid" in tensors:  # as with return_tensors="pt"
            tensors["video_second_per_grid"] = tensors["video_second_per_grid"].float()
        return {**tensors, "use_audio_in_video": True} if has_sound else tensors

    def _alone(self, recordings: list[Samples]) -> dict[str, torch.Tensor]:
        """Spectrograms made one by one: in a batch the end of a shorter one is mixed with its
        padding."""
        found = [self.recordings._mel([each], **_ALONE) for each in recordings]
        longest = max(mask.shape[1] for _, mask in found)
        names = ("input_features", "feature_attention_mask")
        padded = [
            torch.cat([F.pad(torch.tensor(each), (0, longest - each.shape[-1])) for each in values])
            for values in zip(*found, strict=True)
        ]
        return dict(zip(names, padded, strict=True))


def hear_each_alone(model: Any) -> Any:
    """The tower of a model mixes the end of a recording with what pads it in a batch."""
    whole = model.model.get_audio_features

    def features(features: torch.Tensor, mask: torch.Tensor, *_: Any, **_named: Any) -> Any:
        lengths = mask.sum(1).tolist()
        found = [
            whole(each[None, :, :length], each_mask[None, :length]).last_hidden_state
            for each, each_mask, length in zip(features, mask, lengths, strict=True)
        ]
        return SimpleNamespace(last_hidden_state=torch.cat(found))

    model.model.get_audio_features = features
    return model


def sound(seed: int) -> Samples:
    """About as long as the video."""
    return tones(0.9 + 0.4 * seed, seed=10 + seed)


def whole_checkpoint(directory: Path, thinker: Path) -> Path:
    """As repositories have it: the thinker next to a talker, which no service reads."""
    shutil.copytree(thinker, directory)
    config = json.loads((thinker / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": {**config, "architectures": None},
        "talker_config": {},
        "code2wav_config": {},
    }
    write_json(directory / "config.json", whole)
    tensors = load_file(thinker / "model.safetensors")
    tensors = {f"thinker.{name.removeprefix('thinker.')}": each for name, each in tensors.items()}
    tensors |= {f"{name}.norm.weight": torch.ones(3) for name in ("talker.model", "code2wav")}
    save_file(tensors, directory / "model.safetensors")
    return directory
