"""Media of a prompt, always by reference into the blob store."""

from collections.abc import Iterable
from typing import Final

import msgspec

from tokenmesh.shared.ids import BlobKey

IMAGE: Final = "image"
VIDEO: Final = "video"
AUDIO: Final = "audio"
EMBEDS: Final = "embeds"
EMBEDS_PART: Final = "prompt_embeds"
"""The type of a part of a message that is a tensor."""

REPLACE: Final = "replace"
ADD: Final = "add"

EMBEDDINGS_PREFIX: Final = "emb:"
"""Begins the keys of blobs that encoders write."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One image, video or audio clip of a prompt after preprocessing, or a client's embeddings.

    The item stands at the prompt's tokens [offset, offset + length). Each of them takes one
    embedding of the encoder's output, but for those in `holes`.
    """

    kind: str
    """IMAGE, VIDEO or AUDIO; EMBEDS: part of a prompt that a client has given as embeddings."""
    content_hash: str
    """Hex digest of the original bytes plus preprocessing options: the identity for every cache."""
    offset: int
    length: int
    pixels: BlobKey = BlobKey("")
    """The blob with the embeddings themselves, for an item of kind EMBEDS."""
    embeddings: BlobKey | None = None
    """A tensor blob [num_embeddings, width]; set once the encoder has answered. The width is the
    model's hidden size, times 1 + the number of layers that are given more of it (deepstack)."""
    embeddings_check: str = ""
    """The check of that blob's bytes (`blobs.check_of`); empty where the encoder has not seen
    them."""
    features: BlobKey = BlobKey("")
    """A blob of named tensors (`tensor_blob.encode_named`): what the processor made of the item and
    the tower takes, such as `pixel_values`. The first dimension of each is that of a batch."""
    grid: tuple[int, ...] = ()
    """Time, height and width in patches of the tower, for models whose positions depend on it."""
    facts: dict[str, float] = {}
    """Further numbers that positions depend on, by their name in the processor's output."""
    holes: tuple[tuple[int, int], ...] = ()
    """Tokens of the item that keep the embedding of their id: (first, end) counted from `offset`,
    in order, such as the ends of rows of an image or the times between frames of a video."""
    combine: str = REPLACE
    """REPLACE the embeddings of the tokens, or ADD to them."""
    follows: str | None = None
    """For a part of speech: `content_hash` of the part before, from whose state the tower goes on;
    empty for the first part. None: the item is encoded alone."""

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + self.length

    @property
    def num_embeddings(self) -> int:
        """Tokens that take an embedding."""
        return self.length - sum(end - first for first, end in self.holes)

    def runs(self) -> list[tuple[int, int]]:
        """Positions in the prompt that take embeddings, as (first, end), in order."""
        runs, start = [], 0
        for first, end in (*self.holes, (self.length, self.length)):
            if start < first:
                runs.append((self.offset + start, self.offset + first))
            start = end
        return runs


def count_by_modality(media: Iterable[MediaItem]) -> dict[str, int]:
    """Tokens that take an embedding, by the kind of their items; those of EMBEDS are text."""
    counts: dict[str, int] = {}
    for item in media:
        if item.kind != EMBEDS:
            counts[item.kind] = counts.get(item.kind, 0) + item.num_embeddings
    return counts
