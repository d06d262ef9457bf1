"""ItemProcessor: a checkpoint's own processor for one item at a time, in pillow and numpy.

transformers' processor class makes the features and the text that stands for the item. Its video
processor needs torch; `FrameProcessor` takes its place.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy
from PIL import Image

from tokenmesh.services.tokenizer_svc.loading import inner_config, read_config
from tokenmesh.services.tokenizer_svc.media.audio_file import AudioLimits, Samples, decode_audio
from tokenmesh.services.tokenizer_svc.media.mel import load_whisper_extractor
from tokenmesh.services.tokenizer_svc.media.processor_class import PARTS, load_processor
from tokenmesh.services.tokenizer_svc.media.video_file import VideoFile, VideoLimits
from tokenmesh.services.tokenizer_svc.media.video_frames import OPTIONS, FrameProcessor
from tokenmesh.services.tokenizer_svc.media.video_rules import video_rules
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.tensor_blob import TensorBlob, encode_named

_OF_TEXT: Final = frozenset(
    {
        *("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"),
        "text_replacement_offsets",
    }
)
"""Keys of a processor's result that are not about the item."""
_FACTS: Final = ("second_per_grid_ts", "video_second_per_grid")
"""Keys of its result that positions depend on, and not the tower."""
_CHANGEABLE: Final = frozenset(
    {
        *("size", "min_pixels", "max_pixels"),
        *("crop_to_patches", "min_patches", "max_patches"),
        *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
        "pan_and_scan_min_ratio_to_activate",
    }
)
"""Options that a request may set: how large an image is and into how many it is cut. Others would
make what the tower was not trained on."""
_WITH_SOUND: Final = "use_audio_in_video"
_PARAM: Final = "mm_processor_kwargs"
_DTYPES: Final = {"f": "float32", "i": "int64", "u": "int64", "b": "bool"}


class ItemText(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item as a prompt holds it, without its features."""

    text: str
    """The text that stands for it; one of equal tokens that take embeddings and follow each other.
    Empty: the placeholder itself."""
    runs: list[int]
    """The number of tokens that each of them stands for."""
    grid: tuple[int, ...] = ()
    facts: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """One item and its features, an encoded blob of named tensors."""

    prepared: ItemText
    features: bytes

    def encode(self) -> bytes:
        head = msgspec.json.encode(self.prepared)
        return b"".join((len(head).to_bytes(4, "little"), head, self.features))

    @classmethod
    def decode(cls, data: bytes) -> "PreparedItem":
        end = 4 + int.from_bytes(data[:4], "little")
        return cls(msgspec.json.decode(data[4:end], type=ItemText), data[end:])


def embed_ids(config: JsonObject) -> frozenset[int]:
    """The ids of tokens that take embeddings."""
    names = [
        f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")
    ]
    found = {config.get(name) for name in names}
    return frozenset(each for each in found if isinstance(each, int) and each >= 0)


class _MadeVideo:
    """Stands in for the video processor of a processor class: returns what was made before."""

    def __init__(self, frames: FrameProcessor) -> None:
        self.merge_size = frames.merge_size
        self.temporal_patch_size = frames.temporal_patch_size
        self.found: dict[str, Any] = {}

    def __call__(self, _videos: object, **_named: object) -> dict[str, Any]:
        return self.found


_NO_VIDEO: Final = numpy.zeros((1, 2, 2, 3), numpy.uint8)
"""The processor class counts this; the frames are in `_MadeVideo`."""


class ItemProcessor:
    """Runs the processor of one checkpoint.

    Raises CheckpointError for one whose processor cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        stated = read_config(directory)
        self._config = inner_config(stated)
        load_extractor = partial(load_whisper_extractor, directory)
        self._processor: Any = load_processor(directory, self._config, load_extractor)
        tokenizer = self._processor.tokenizer
        texts = [tokenizer.convert_ids_to_tokens(each) for each in sorted(embed_ids(self._config))]
        self._embeds = [text for text in texts if text]
        self.placeholder: str = self._processor.image_token
        images = self._processor.image_processor
        self.hears = _place_sound(directory, self._config, self._processor)
        """True where a video may be taken with its sound."""
        rest = {name: _plain(value) for name, value in vars(self._processor).items()}
        rest = {name: value for name, value in rest.items() if name not in PARTS}
        sound = self._processor.feature_extractor.to_dict() if self.hears else {}
        self.options = msgspec.json.encode([images.to_dict(), rest, sound], order="sorted")
        """All options that change a result."""
        known = set(getattr(type(images), "valid_kwargs", SimpleNamespace).__annotations__)
        self._known = _CHANGEABLE & (known | set(vars(images)))
        self.video_placeholder: str = getattr(self._processor, "video_token", None) or ""
        takes_videos = bool(self.video_placeholder) and self._config is stated
        rules = video_rules(directory, self._config) if takes_videos else None
        self.frames = None if rules is None else FrameProcessor(rules)
        """None: the model takes no videos."""
        if self.frames is not None:
            self._made = self._processor.video_processor = _MadeVideo(self.frames)

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise InvalidInput for options of a request that the processor does not know."""
        known = self._known if self.frames is None else self._known | OPTIONS
        if self.hears:
            known |= {_WITH_SOUND}
        for name in options:
            if name not in known:
                raise InvalidInput(
                    f"mm_processor_kwargs: the model's processor has no option {name!r}; it has "
                    f"{', '.join(sorted(known))}",
                    param=_PARAM,
                )
        if not isinstance(options.get(_WITH_SOUND, False), bool):
            raise InvalidInput(f"{_PARAM}: {_WITH_SOUND} is not true or false", param=_PARAM)

    def image(self, image: Image.Image, options: Mapping[str, Any]) -> PreparedItem:
        """Raises ValueError, TypeError and the like for what cannot be processed."""
        named = {name: value for name, value in options.items() if name in self._known}
        return self._prepared({"images": [image], "text": [self.placeholder], **named})

    def sound(self, data: bytes, options: Mapping[str, Any], max_s: float) -> Samples | None:
        """That of a video file, if the request wants it. Raises InvalidInput or PayloadTooLarge."""
        if not options.get(_WITH_SOUND):
            return None
        if "num_frames" in options:
            problem = f"{_WITH_SOUND} and num_frames exclude each other: set fps"
            raise InvalidInput(f"{_PARAM}: {problem}", param=_PARAM)
        try:
            rate = self._processor.feature_extractor.sampling_rate
            return decode_audio(data, rate, AudioLimits(max_s))
        except InvalidInput as error:
            raise type(error)(f"{_WITH_SOUND}: {error.message}") from error

    def video(
        self,
        video: VideoFile,
        options: Mapping[str, Any],
        limits: VideoLimits,
        sound: Samples | None = None,
    ) -> PreparedItem:
        """Raises InvalidInput or PayloadTooLarge, and ValueError and the like as `image` does."""
        assert self.frames is not None, "the model takes no videos"
        inputs = {"videos": [_NO_VIDEO], "text": [self.video_placeholder]}
        if self.hears and (rate := self.frames.rate(options)) is not None:
            inputs["fps"] = rate  # which the class takes for the times between frames
        if sound is not None:
            inputs |= {"audio": [sound], "audio_from_video_indices": [0]}
            inputs["load_audio_from_video"] = True
        try:
            self._made.found = self.frames.features(video, options, limits)
            return self._prepared(inputs)
        finally:
            self._made.found = {}

    def _prepared(self, inputs: Mapping[str, Any]) -> PreparedItem:
        found = self._processor(return_tensors="np", return_text_replacement_offsets=True, **inputs)
        (offsets,) = found["text_replacement_offsets"]
        (replaced,) = offsets
        tensors = {
            name: numpy.asarray(value) for name, value in found.items() if name not in _OF_TEXT
        }
        facts = {name: float(tensors.pop(name)[0]) for name in _FACTS if name in tensors}
        grid = tensors.get("image_grid_thw", tensors.get("video_grid_thw"))
        text, runs = self._collapsed(replaced["replacement"])
        if "video_grid_thw" in tensors and "input_features" in tensors:
            tensors["is_sound"] = self._is_sound(text, runs)
        prepared = ItemText(text, runs, () if grid is None else tuple(map(int, grid[0])), facts)
        named = {name: _blob(value) for name, value in tensors.items()}
        return PreparedItem(prepared, encode_named(named))

    def _is_sound(self, text: str, runs: list[int]) -> numpy.ndarray:
        """Mark the tokens of a video that take an embedding: 1 for those of the sound, else 0."""
        token = self._processor.audio_token
        ends = re.escape(self.video_placeholder), re.escape(token)
        found = [each == token for each in re.findall("|".join(ends), text)]
        return numpy.repeat(numpy.array(found, numpy.int64), runs)

    def _collapsed(self, text: str) -> tuple[str, list[int]]:
        pieces, runs, at = [], [], 0
        while at < len(text):
            starts = [(text.find(each, at), each) for each in self._embeds]
            first, token = min(((s, t) for s, t in starts if s >= 0), default=(-1, ""))
            if first < 0:
                break
            count, end = 0, first
            while text.startswith(token, end):
                count, end = count + 1, end + len(token)
            pieces += [text[at:first], token]
            runs.append(count)
            at = end
        return "".join([*pieces, text[at:]]), runs


def _place_sound(directory: Path, config: JsonObject, processor: Any) -> bool:
    """Return whether a processor takes videos with their sound; then set where it places the sound.

    The tokens are placed by config.json, as the model counts positions. Raises CheckpointError.
    """
    name = "position_id_per_seconds"
    if getattr(processor, name, None) is None:
        return False
    stated = config.get(name)  # the classes of config and processor have two defaults
    if not isinstance(stated, int) or isinstance(stated, bool) or stated < 1:
        problem = f"is {stated!r}, not a positive whole number"
        raise CheckpointError(f"{directory}: config.json: {name} {problem}", param=name)
    setattr(processor, name, stated)
    return True


def _blob(value: numpy.ndarray) -> TensorBlob:
    dtype = _DTYPES[value.dtype.kind]
    little = numpy.ascontiguousarray(value, dtype=numpy.dtype(dtype).newbyteorder("<"))
    return TensorBlob(dtype, little.shape, little.tobytes())


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | list) else None


MOST_OPTION_BYTES: Final = 1 << 14
"""The bound of all options of a request: they are numbers and names."""


def read_options(data: bytes) -> dict[str, Any]:
    """The options of a request; raises InvalidInput."""
    if len(data) > MOST_OPTION_BYTES:
        raise InvalidInput(
            f"mm_processor_kwargs is {len(data)} bytes of JSON, at most {MOST_OPTION_BYTES}",
            param="mm_processor_kwargs",
        )
    try:
        options = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            "mm_processor_kwargs is not JSON", param="mm_processor_kwargs"
        ) from error
    if not isinstance(options, dict):
        raise InvalidInput("mm_processor_kwargs is not an object", param="mm_processor_kwargs")
    return options
