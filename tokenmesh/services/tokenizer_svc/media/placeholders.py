"""Placeholders: each image token of a prompt becomes as many as the image has embeddings."""

from dataclasses import dataclass

from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import MediaItem


@dataclass(frozen=True, slots=True)
class Pixels:
    """A preprocessed image in the blob store."""

    content_hash: str
    key: BlobKey


def expand_placeholders(
    ids: list[int], image_token: int, tokens_per_image: int, images: list[Pixels]
) -> tuple[list[int], list[MediaItem]]:
    """The longer ids, and for each image where it stands in them.

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

    An image that is gone as a whole is dropped. Raises InvalidInput for one that is cut apart.
    """
    shifted = []
    for item in items:
        start = item.offset - num_lost
        end = start + item.length
        if end <= 0 or start >= num_left:
            continue
        if start < 0 or end > num_left:
            raise InvalidInput(
                "truncation would cut an image apart: allow more tokens or send fewer images",
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
