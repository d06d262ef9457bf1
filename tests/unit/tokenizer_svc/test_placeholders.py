"""Placeholders stand where their images are, through expansion and truncation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.services.tokenizer_svc.encoding import Side, truncate_ids
from tokenmesh.services.tokenizer_svc.media.vision import (
    Pixels,
    expand_placeholders,
    shift_items,
)
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import BlobKey

IMAGE = 9


def images(count: int) -> list[Pixels]:
    return [Pixels(f"hash{number}", BlobKey(f"key{number}")) for number in range(count)]


def test_each_image_token_becomes_as_many_as_the_image_has_embeddings() -> None:
    ids, items = expand_placeholders([1, IMAGE, 2, IMAGE], IMAGE, 3, images(2))
    assert ids == [1, IMAGE, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE]
    assert [(item.offset, item.length, item.pixels) for item in items] == [
        (1, 3, "key0"),
        (5, 3, "key1"),
    ]


@pytest.mark.parametrize(("ids", "count"), [([1, 2], 1), ([IMAGE], 0), ([IMAGE, IMAGE], 1)])
def test_a_mismatch_of_placeholders_and_images_says_both_numbers(
    ids: list[int], count: int
) -> None:
    message = f"{ids.count(IMAGE)} image placeholders for {count} images"
    with pytest.raises(InvalidInput, match=message):
        expand_placeholders(ids, IMAGE, 3, images(count))


@given(
    st.lists(st.sampled_from([1, 2, IMAGE]), max_size=12),
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from(["left", "right"]),
)
def test_after_truncation_items_still_cover_their_placeholders(
    ids: list[int], length: int, limit: int, side: Side
) -> None:
    expanded, items = expand_placeholders(ids, IMAGE, length, images(ids.count(IMAGE)))
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
