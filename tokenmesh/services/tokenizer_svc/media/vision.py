"""VisionModel: how one checkpoint takes images, read from its config.json."""

import logging
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tokenmesh.services.tokenizer_svc.checkpoint import positive_int
from tokenmesh.services.tokenizer_svc.loading import (
    ImageProcessor,
    LoadedModel,
    load_image_processor,
)
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VisionModel:
    """What stands for an image in a prompt, and how its pixels are made."""

    image_token: int
    placeholder: str
    """The image token as text."""
    tokens_per_image: int
    processor: ImageProcessor
    checkpoint: Path
    """Where the processor was loaded from."""


def vision_model(loaded: LoadedModel) -> VisionModel | None:
    """None for a model that takes text only, or whose tower is none of ours.

    Raises CheckpointError.
    """
    vision = loaded.config.get("vision_config")
    if loaded.config.get("model_type") != "llava" or not isinstance(vision, dict):
        return None
    if vision.get("model_type") != "clip_vision_model":
        logger.warning(
            "%s: a vision tower of type %s is not supported: serving text only",
            loaded.directory,
            vision.get("model_type"),
        )
        return None
    return _llava(loaded, vision)


def _llava(loaded: LoadedModel, vision: JsonObject) -> VisionModel:
    config = loaded.config
    token = positive_int(config.get("image_token_index") or config.get("image_token_id"))
    if token is None:
        raise CheckpointError(f"{loaded.directory}: config.json lacks image_token_index")
    # CLIPVisionConfig's own defaults; a config.json leaves them out.
    size = positive_int(vision.get("image_size", 224)) or 0
    patch = positive_int(vision.get("patch_size", 32)) or 1
    has_class_token = config.get("vision_feature_select_strategy", "default") == "full"
    placeholder = loaded.tokenizer.id_to_token(token)
    if placeholder is None:
        raise CheckpointError(f"{loaded.directory}: the tokenizer lacks the image token {token}")
    processor = load_image_processor(loaded.directory)
    shape = processor(Image.new("RGB", (8, 8))).shape
    if shape != (3, size, size):
        raise CheckpointError(
            f"{loaded.directory}: the image processor makes {shape}, the tower takes "
            f"(3, {size}, {size})"
        )
    return VisionModel(
        image_token=token,
        placeholder=placeholder,
        tokens_per_image=(size // patch) ** 2 + has_class_token,
        processor=processor,
        checkpoint=loaded.directory,
    )
