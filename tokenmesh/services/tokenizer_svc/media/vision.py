"""VisionModel: how a checkpoint takes images; and the image placeholders in its prompts."""

import logging
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tokenmesh.services.tokenizer_svc.loading import (
    ImageProcessor,
    LoadedTokenizer,
    load_image_processor,
    positive_int,
)
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import MediaItem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pixels:
    """A preprocessed image in the blob store."""

    content_hash: str
    key: BlobKey


def expand_placeholders(
    ids: list[int], image_token: int, tokens_per_image: int, images: list[Pixels]
) -> tuple[list[int], list[MediaItem]]:
    """Replace each image token by as many as the image has embeddings; returns the items, too.

    Raises InvalidInput unless the prompt has exactly one image token for each image.
    """
    num_placeholders = ids.count(image_token)
    if num_placeholders != len(images):
        raise InvalidInput(
            f"the prompt holds {num_placeholders} image placeholders for {len(images)} images",
            param="messages",
        )
    expanded: list[int] = []
    items: list[MediaItem] = []
    start = 0
    for image in images:
        place = ids.index(image_token, start)
        expanded += ids[start:place]
        items.append(
            MediaItem(
                kind="image",
                content_hash=image.content_hash,
                offset=len(expanded),
                length=tokens_per_image,
                pixels=image.key,
            )
        )
        expanded += [image_token] * tokens_per_image
        start = place + 1
    return expanded + ids[start:], items


def shift_items(items: list[MediaItem], num_lost: int, num_left: int) -> list[MediaItem]:
    """The items after `num_lost` tokens were cut before a window of `num_left` tokens.

    Drops an image that was cut off. Raises InvalidInput for one of which a part was cut off.
    """
    shifted = []
    for item in items:
        start = item.offset - num_lost
        end = start + item.length
        if end <= 0 or start >= num_left:
            continue
        if start < 0 or end > num_left:
            raise InvalidInput(
                "truncation would cut off a part of an image: allow more tokens or fewer images",
                param="truncate_prompt_tokens",
            )
        shifted.append(
            MediaItem(
                kind=item.kind,
                content_hash=item.content_hash,
                offset=start,
                length=item.length,
                pixels=item.pixels,
            )
        )
    return shifted


@dataclass(frozen=True, slots=True)
class VisionModel:
    """The placeholders of an image in a prompt, and its preprocessing."""

    image_token: int
    placeholder: str
    """The image token as text."""
    tokens_per_image: int
    processor: ImageProcessor
    checkpoint: Path
    """The directory from which the processor was loaded."""


def vision_model(loaded: LoadedTokenizer) -> VisionModel | None:
    """None for a model that accepts text only, or whose tower is not supported.

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


def _llava(loaded: LoadedTokenizer, vision: JsonObject) -> VisionModel:
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
            f"{loaded.directory}: the image processor makes {shape}, the tower needs "
            f"(3, {size}, {size})"
        )
    return VisionModel(
        image_token=token,
        placeholder=placeholder,
        tokens_per_image=(size // patch) ** 2 + has_class_token,
        processor=processor,
        checkpoint=loaded.directory,
    )
