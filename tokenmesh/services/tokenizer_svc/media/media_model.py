"""MediaModel: how a checkpoint takes media; and the places of items in its prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from tokenmesh.services.tokenizer_svc.loading import LoadedTokenizer
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor, ItemText, embed_ids
from tokenmesh.services.tokenizer_svc.media.recordings import (
    RecordingProcessor,
    audio_token,
    takes_recordings,
)
from tokenmesh.shared.config.model import MediaSettings, ModelSettings
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import AUDIO, IMAGE, VIDEO, MediaItem

NOUNS: Final = {IMAGE: "images", VIDEO: "videos", AUDIO: "recordings"}
"""Items of a kind, as errors name them."""
_MOST: Final = "model.limit_mm_per_prompt, or tokenizer.media.max_{}"


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A preprocessed item whose features are in the blob store."""

    content_hash: str
    features: BlobKey
    prepared: ItemText
    kind: str = IMAGE


@dataclass(frozen=True, slots=True)
class MediaKind:
    """Describes how a model takes items of one kind."""

    placeholder: str
    """The text that a chat template writes for an item; the item's text replaces it."""
    options: bytes
    """All options of the preprocessing that change its result."""
    max_items: int
    """In one prompt."""
    setting: str
    """Where `max_items` comes from."""
    in_text: str = ""
    """The text that stands for an item before the text, where a template takes contents as text
    only; empty: the placeholder."""


@dataclass(frozen=True, slots=True)
class MediaModel:
    """The kinds of media that a model takes, and their placeholders in a prompt."""

    kinds: Mapping[str, MediaKind]
    embed_ids: frozenset[int]
    """Tokens that take embeddings."""
    checkpoint: Path
    """The directory from which processors are loaded."""

    @property
    def placeholders(self) -> dict[str, str]:
        """The text that stands for an item of each kind in a text."""
        return {name: kind.in_text or kind.placeholder for name, kind in self.kinds.items()}

    def inserted(self, text: str, items: Sequence[StoredItem]) -> tuple[str, list[StoredItem]]:
        """A rendered prompt with the text of each item in place of its placeholder, and the items
        in the order of the text. The items of a kind are in the order of their placeholders.

        Raises InvalidInput unless the prompt has exactly one placeholder for each item.
        """
        places: list[tuple[int, int, StoredItem]] = []
        for name, kind in self.kinds.items():
            wanted = [item for item in items if item.kind == name]
            starts = _starts(text, kind.placeholder)
            if len(starts) != len(wanted):
                raise InvalidInput(
                    f"the prompt holds {len(starts)} {name} placeholders for {len(wanted)} "
                    f"{NOUNS[name]}",
                    param="messages",
                )
            size = len(kind.placeholder)
            places += [(at, at + size, item) for at, item in zip(starts, wanted, strict=True)]
        places.sort(key=lambda place: place[0])
        pieces, end = [], 0
        for start, after, item in places:
            pieces += [text[end:start], item.prepared.text or text[start:after]]
            end = after
        return "".join([*pieces, text[end:]]), [item for *_, item in places]

    def expanded(
        self, ids: list[int], items: Sequence[StoredItem]
    ) -> tuple[list[int], list[MediaItem]]:
        """The ids of such a text with a token for each embedding, and the items in them.

        Raises InvalidInput for tokens that take embeddings but are of no item.
        """
        places = sorted(place for token in self.embed_ids for place in _places(ids, token))
        num_runs = sum(len(item.prepared.runs) for item in items)
        if len(places) != num_runs:
            raise InvalidInput(
                f"the prompt holds {len(places)} placeholders of media, {num_runs} are of its "
                f"{len(items)} items",
                param="messages",
            )
        expanded: list[int] = []
        found, start, left = [], 0, iter(places)
        for item in items:
            runs = []
            for count in item.prepared.runs:
                place = next(left)
                expanded += ids[start:place]
                runs.append((len(expanded), len(expanded) + count))
                expanded += [ids[place]] * count
                start = place + 1
            found.append(_item(item, runs))
        return expanded + ids[start:], found


def _starts(text: str, placeholder: str) -> list[int]:
    found, at = [], text.find(placeholder)
    while at >= 0:
        found.append(at)
        at = text.find(placeholder, at + len(placeholder))
    return found


def _places(ids: list[int], token: int) -> list[int]:
    found, start = [], 0
    for _ in range(ids.count(token)):
        place = ids.index(token, start)
        found.append(place)
        start = place + 1
    return found


def _item(stored: StoredItem, runs: list[tuple[int, int]]) -> MediaItem:
    offset, end = runs[0][0], runs[-1][1]
    holes = [
        (before[1] - offset, after[0] - offset)
        for before, after in pairwise(runs)
        if before[1] < after[0]
    ]
    return MediaItem(
        kind=stored.kind,
        content_hash=stored.content_hash,
        offset=offset,
        length=end - offset,
        features=stored.features,
        grid=stored.prepared.grid,
        facts=stored.prepared.facts,
        holes=tuple(holes),
    )


def shift_items(items: list[MediaItem], num_lost: int, num_left: int) -> list[MediaItem]:
    """The items after `num_lost` tokens were cut before a window of `num_left` tokens.

    Drops an item that was cut off. Raises InvalidInput for one of which a part was cut off.
    """
    shifted = []
    for item in items:
        start = item.offset - num_lost
        end = start + item.length
        if end <= 0 or start >= num_left:
            continue
        if start < 0 or end > num_left:
            raise InvalidInput(
                "truncation would cut off a part of a media item: allow more tokens or fewer items",
                param="truncate_prompt_tokens",
            )
        shifted.append(msgspec.structs.replace(item, offset=start))
    return shifted


def media_model(
    loaded: LoadedTokenizer, settings: ModelSettings, limits: MediaSettings
) -> MediaModel | None:
    """None for a model that accepts text only. Raises CheckpointError."""
    if settings.language_model_only:
        return None
    kinds: dict[str, MediaKind] = {}
    ids = embed_ids(loaded.config)
    try:
        if isinstance(loaded.config.get("vision_config"), dict):
            kinds |= _pictures(loaded, settings, limits)
        if takes_recordings(loaded.config):
            kinds[AUDIO] = _recordings(loaded, settings, limits)
        if not kinds:
            return None
        if not ids:
            raise CheckpointError(f"{loaded.directory}: config.json names no token of an image")
        for each in ids:
            if loaded.tokenizer.id_to_token(each) is None:
                raise CheckpointError(f"{loaded.directory}: the tokenizer lacks the token {each}")
    except CheckpointError as error:
        hint = "--language-model-only serves its text alone"
        raise CheckpointError(f"{error.message}; {hint}") from error
    return MediaModel(kinds, ids, loaded.directory)


def _pictures(
    loaded: LoadedTokenizer, settings: ModelSettings, limits: MediaSettings
) -> dict[str, MediaKind]:
    """Images, and videos where `FrameProcessor` has the rules of the checkpoint."""
    processor = ItemProcessor(loaded.directory)
    most = settings.limit_mm_per_prompt.get(IMAGE, limits.max_images)
    kinds = {
        IMAGE: MediaKind(processor.placeholder, processor.options, most, _MOST.format("images"))
    }
    if processor.frames is not None:
        options = processor.frames.options + processor.options
        most = settings.limit_mm_per_prompt.get(VIDEO, limits.max_videos)
        kinds[VIDEO] = MediaKind(processor.video_placeholder, options, most, _MOST.format("videos"))
    return kinds


def _recordings(
    loaded: LoadedTokenizer, settings: ModelSettings, limits: MediaSettings
) -> MediaKind:
    processor, number = RecordingProcessor(loaded.directory), audio_token(loaded.config)
    token = None if number is None else loaded.tokenizer.id_to_token(number)
    if token is None:
        raise CheckpointError(f"{loaded.directory}: config.json names no token of a recording")
    most = settings.limit_mm_per_prompt.get(AUDIO, limits.max_images)
    return MediaKind(
        token, processor.options, most, _MOST.format("images"), token.join(processor.around)
    )
