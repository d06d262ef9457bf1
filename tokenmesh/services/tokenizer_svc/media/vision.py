"""VisionModel: how a checkpoint takes images; and the places of images in its prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from tokenmesh.services.tokenizer_svc.loading import LoadedTokenizer
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor, ItemText, embed_ids
from tokenmesh.shared.config.model import MediaSettings, ModelSettings
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import IMAGE, MediaItem


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A preprocessed item whose features are in the blob store."""

    content_hash: str
    features: BlobKey
    prepared: ItemText


@dataclass(frozen=True, slots=True)
class VisionModel:
    """The placeholders of an image in a prompt, and its preprocessing."""

    placeholder: str
    """What a chat template writes for an image."""
    embed_ids: frozenset[int]
    """Tokens that take embeddings."""
    processor: ItemProcessor
    checkpoint: Path
    """The directory from which the processor was loaded."""
    max_images: int
    """In one prompt."""

    def inserted(self, text: str, images: Sequence[StoredItem]) -> str:
        """A rendered prompt with the text that stands for each image in place of its placeholder.

        Raises InvalidInput unless the prompt has exactly one placeholder for each image.
        """
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != len(images):
            raise InvalidInput(
                f"the prompt holds {len(pieces) - 1} image placeholders for {len(images)} images",
                param="messages",
            )
        texts = [image.prepared.text for image in images]
        between = zip(texts, pieces[1:], strict=True)
        return "".join([pieces[0], *(part for pair in between for part in pair)])

    def expanded(
        self, ids: list[int], images: Sequence[StoredItem]
    ) -> tuple[list[int], list[MediaItem]]:
        """The ids of such a text with a token for each embedding, and the items in them.

        Raises InvalidInput for tokens that take embeddings but are of no image.
        """
        places = sorted(place for token in self.embed_ids for place in _places(ids, token))
        if len(places) != sum(len(image.prepared.runs) for image in images):
            raise InvalidInput(
                f"the prompt holds {len(places)} image placeholders for {len(images)} images",
                param="messages",
            )
        expanded: list[int] = []
        items, start, left = [], 0, iter(places)
        for image in images:
            runs = []
            for count in image.prepared.runs:
                place = next(left)
                expanded += ids[start:place]
                runs.append((len(expanded), len(expanded) + count))
                expanded += [ids[place]] * count
                start = place + 1
            items.append(_item(image, runs))
        return expanded + ids[start:], items


def _places(ids: list[int], token: int) -> list[int]:
    found, start = [], 0
    for _ in range(ids.count(token)):
        place = ids.index(token, start)
        found.append(place)
        start = place + 1
    return found


def _item(image: StoredItem, runs: list[tuple[int, int]]) -> MediaItem:
    offset, end = runs[0][0], runs[-1][1]
    holes = [
        (before[1] - offset, after[0] - offset)
        for before, after in pairwise(runs)
        if before[1] < after[0]
    ]
    return MediaItem(
        kind=IMAGE,
        content_hash=image.content_hash,
        offset=offset,
        length=end - offset,
        features=image.features,
        grid=image.prepared.grid,
        facts=image.prepared.facts,
        holes=tuple(holes),
    )


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
        shifted.append(msgspec.structs.replace(item, offset=start))
    return shifted


def vision_model(
    loaded: LoadedTokenizer, settings: ModelSettings, limits: MediaSettings
) -> VisionModel | None:
    """None for a model that accepts text only. Raises CheckpointError."""
    if settings.language_model_only or not isinstance(loaded.config.get("vision_config"), dict):
        return None
    ids = embed_ids(loaded.config)
    try:
        if not ids:
            raise CheckpointError(f"{loaded.directory}: config.json names no token of an image")
        for each in ids:
            if loaded.tokenizer.id_to_token(each) is None:
                raise CheckpointError(f"{loaded.directory}: the tokenizer lacks the token {each}")
        processor = ItemProcessor(loaded.directory)
    except CheckpointError as error:
        hint = "--language-model-only serves its text alone"
        raise CheckpointError(f"{error.message}; {hint}") from error
    return VisionModel(
        placeholder=processor.placeholder,
        embed_ids=ids,
        processor=processor,
        checkpoint=loaded.directory,
        max_images=settings.limit_mm_per_prompt.get(IMAGE, limits.max_images),
    )
