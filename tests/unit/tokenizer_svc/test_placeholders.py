"""Placeholders stand where their images are, through expansion and truncation."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.services.tokenizer_svc.encoding import Side, truncate_ids
from tokenmesh.services.tokenizer_svc.media.media_model import (
    MediaKind,
    MediaModel,
    StoredItem,
    shift_items,
)
from tokenmesh.services.tokenizer_svc.media.processor import ItemText
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import BlobKey

IMAGE = 9
MODEL = MediaModel(
    {
        "image": MediaKind("<image>", b"", 4, ""),
        "audio": MediaKind("<audio>", b"", 4, "", "[<audio>]"),
    },
    frozenset({IMAGE, 8}),
    Path(),
)


def images(count: int, *runs: int) -> list[StoredItem]:
    prepared = ItemText("[<image>]" * len(runs), list(runs), (1, 2, 3), {"s": 0.5})
    return [
        StoredItem(f"hash{number}", BlobKey(f"key{number}"), prepared) for number in range(count)
    ]


def test_each_image_token_becomes_as_many_as_the_image_has_embeddings() -> None:
    ids, items = MODEL.expanded([1, IMAGE, 2, IMAGE], images(2, 3))
    assert ids == [1, IMAGE, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE]
    assert [(item.offset, item.length, item.features, item.holes) for item in items] == [
        (1, 3, "key0", ()),
        (5, 3, "key1", ()),
    ]
    assert {(item.grid, *item.facts.items()) for item in items} == {((1, 2, 3), ("s", 0.5))}


def test_text_between_the_rows_of_an_image_is_a_hole_in_it() -> None:
    ids, items = MODEL.expanded(
        [1, IMAGE, 7, 7, 8, IMAGE, 5, IMAGE, 6, 8, 8, 3], images(2, 2, 1, 3)
    )
    assert ids == [1, 9, 9, 7, 7, 8, 9, 9, 9, 5, 9, 9, 6, 8, 8, 8, 8, 3]
    first, second = items
    assert (first.offset, first.length, first.holes) == (1, 8, ((2, 4),))
    assert (second.offset, second.length, second.holes) == (10, 7, ((2, 3),))
    assert first.runs() == [(1, 3), (5, 9)]
    assert first.num_embeddings == 6


def test_a_prompt_has_a_placeholder_for_each_image() -> None:
    two = images(2, 1, 1)
    assert MODEL.inserted("a <image>b<image>", two) == (
        "a [<image>][<image>]b[<image>][<image>]",
        two,
    )
    assert MODEL.inserted("plain", []) == ("plain", [])
    with pytest.raises(InvalidInput, match="1 image placeholders for 2 images"):
        MODEL.inserted("a <image>", images(2, 1))


def test_items_of_several_kinds_are_in_the_order_of_their_placeholders() -> None:
    first, second = images(2, 1)
    sound = StoredItem("sound", BlobKey("s"), ItemText("<s>", [2]), "audio")
    text, items = MODEL.inserted("<audio> a <image> b <image>", [first, sound, second])
    assert text == "<s> a [<image>] b [<image>]"
    assert items == [sound, first, second]
    assert MODEL.placeholders == {"image": "<image>", "audio": "[<audio>]"}
    with pytest.raises(InvalidInput, match="0 audio placeholders for 1 recordings"):
        MODEL.inserted("<image>", [first, sound])


@pytest.mark.parametrize(("ids", "count"), [([1, 2], 1), ([IMAGE], 0), ([IMAGE, IMAGE], 1)])
def test_a_mismatch_of_placeholders_and_images_says_both_numbers(
    ids: list[int], count: int
) -> None:
    message = f"{ids.count(IMAGE)} placeholders of media, {count} are of its {count} items"
    with pytest.raises(InvalidInput, match=message):
        MODEL.expanded(ids, images(count, 3))


@given(
    st.lists(st.sampled_from([1, 2, IMAGE]), max_size=12),
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from(["left", "right"]),
)
def test_after_truncation_items_still_cover_their_placeholders(
    ids: list[int], length: int, limit: int, side: Side
) -> None:
    expanded, items = MODEL.expanded(ids, images(ids.count(IMAGE), length))
    kept = truncate_ids(expanded, limit, side)
    num_lost = len(expanded) - len(kept) if side == "left" else 0
    try:
        shifted = shift_items(items, num_lost, len(kept))
    except InvalidInput:
        # Only a cut through an image is refused.
        assert kept.count(IMAGE) % length
        return
    covered = {place for item in shifted for place in range(item.offset, item.offset + length)}
    assert covered == {place for place, token in enumerate(kept) if token == IMAGE}
