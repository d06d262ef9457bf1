"""VideoRules: the options of a checkpoint's video processor, with transformers' defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from PIL import Image

from tokenmesh.services.tokenizer_svc.loading import read_json
from tokenmesh.services.tokenizer_svc.render_job import JsonObject

_CHANNELS: Final = 3


class VideoRules(msgspec.Struct, kw_only=True):
    """The options of a video processor in its checkpoint, by their names there."""

    size: dict[str, int | None]
    image_mean: list[float]
    image_std: list[float]
    patch_size: int
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_frames: int = 4
    max_frames: int = 768
    fps: float | None = None
    num_frames: int | None = None
    rescale_factor: float = 1 / 255
    resample: int = Image.Resampling.BICUBIC
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int
    min_pixels: int | None = None
    max_pixels: int | None = None
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    is_total: bool
    """True where the bounds of `size` are of all frames together, not of each."""


_CLIP_MEAN: Final = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD: Final = [0.26862954, 0.26130258, 0.27577711]
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen2VLVideoProcessor": {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "patch_size": 14,
        "is_total": False,
        "max_video_tokens": 128_000,
    },
    "Qwen3VLVideoProcessor": {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "image_mean": [0.5] * _CHANNELS,
        "image_std": [0.5] * _CHANNELS,
        "patch_size": 16,
        "is_total": True,
        "max_video_tokens": 768,
        "fps": 2,
    },
}
"""Values that the processors take where a checkpoint does not say."""
_BY_MODEL: Final = {
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen3_vl_moe": "Qwen3VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor",
    "qwen3_5_moe": "Qwen3VLVideoProcessor",
    "qwen3_omni_moe_thinker": "Qwen2VLVideoProcessor",
}
_OVER_STATED: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3_omni_moe_thinker": {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "min_pixels": None,
        "max_pixels": None,
    },
}
"""Values that a model's processor class gives to its video processor, whatever the checkpoint
says."""


def video_rules(directory: Path, config: JsonObject) -> VideoRules | None:
    """None for a checkpoint whose video processor has other rules, or none."""
    model = str(config.get("model_type"))
    if model not in _BY_MODEL:
        return None
    stated = _stated(directory)
    name = stated.get("video_processor_type")
    if name is None:
        # an older checkpoint has options of images and videos in one file
        image = str(stated.get("image_processor_type", "")).removesuffix("Fast")
        name = image.replace("ImageProcessor", "VideoProcessor") or _BY_MODEL[model]
    if not isinstance(name, str) or name not in _DEFAULTS:
        return None
    try:
        over = _OVER_STATED.get(model, {})
        rules = msgspec.convert({**_DEFAULTS[name], **stated, **over}, VideoRules)
    except msgspec.ValidationError:
        return None
    if not (rules.do_resize and rules.do_rescale and rules.do_normalize):
        return None
    return rules


def _stated(directory: Path) -> JsonObject:
    """The options of a checkpoint's video processor, from the first file that has them."""
    nested = read_json(directory / "processor_config.json").get("video_processor")
    found = nested if isinstance(nested, dict) else {}
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        found = found or read_json(directory / name)
    return {key: value for key, value in found.items() if value is not None}
