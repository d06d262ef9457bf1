"""Route-block hashes: chained, tagged, and equal only for equal prefixes."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.shared.hashing import (
    HASH_BYTES,
    Adapter,
    extra_keys_for_block,
    route_hashes,
    route_scope,
)
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.tokens import pack_ids

SCOPE = route_scope("model", "abc", 4)


def image(content_hash: str, offset: int, length: int) -> MediaItem:
    return MediaItem(
        kind="image",
        content_hash=content_hash,
        offset=offset,
        length=length,
        pixels=BlobKey("pixels"),
    )


def hashes(ids: list[int], **extras: object) -> list[bytes]:
    data = route_hashes(pack_ids(ids), 4, SCOPE, **extras)  # type: ignore[arg-type]
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]


def test_golden_hash_never_changes() -> None:
    assert route_hashes(pack_ids(range(8)), 4, b"scope").hex() == "1be22d1038a42b98d5a412b037bdc394"


def test_hash_is_little_endian_xxh3_over_parent_and_ids() -> None:
    parent = xxhash.xxh3_64_digest(SCOPE)
    expected = xxhash.xxh3_64_intdigest(parent + pack_ids([1, 2, 3, 4]))
    assert int.from_bytes(hashes([1, 2, 3, 4])[0], "little") == expected


def test_only_full_blocks_are_hashed() -> None:
    assert [len(hashes(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40))
def test_equal_prefixes_share_exactly_their_full_blocks(ids: list[int], at: int) -> None:
    changed = [*ids[:at], *(token ^ 1 for token in ids[at : at + 1]), *ids[at + 1 :]]
    same = [a == b for a, b in zip(hashes(ids), hashes(changed), strict=True)]
    first_changed = at // 4 if at < len(ids) else len(same)
    assert same == [index < first_changed for index in range(len(same))]


@pytest.mark.parametrize("extra", [{"lora": "a"}, {"salt": "a"}])
def test_lora_and_salt_change_every_hash_and_never_mean_the_same(extra: dict[str, str]) -> None:
    ids = list(range(12))
    plain, changed = hashes(ids), hashes(ids, **extra)
    assert not set(plain) & set(changed)
    assert not set(hashes(ids, lora="a")) & set(hashes(ids, salt="a"))


def test_salt_stands_in_the_first_block_only() -> None:
    assert extra_keys_for_block(0, 4, lora=None, salt="s", media=())
    assert extra_keys_for_block(4, 8, lora=None, salt="s", media=()) == b""


def test_the_type_of_a_kv_cache_stands_in_the_first_block_only() -> None:
    named = {extra_keys_for_block(0, 4, lora=None, salt=each, media=()) for each in ("int8", None)}
    for code in ("int8", "fp8_e4m3"):
        named.add(extra_keys_for_block(0, 4, lora=None, salt=None, media=(), kv_code=code))
    assert len(named) == 4
    assert extra_keys_for_block(4, 8, lora=None, salt=None, media=(), kv_code="int8") == b""


def test_media_taints_from_the_block_of_its_first_placeholder() -> None:
    ids = [7] * 16
    one, other = (hashes(ids, media=[image(name, 5, 3)]) for name in ("aa", "bb"))
    assert one[0] == other[0] == hashes(ids)[0]
    assert not set(one[1:]) & set(other[1:])


def test_the_same_media_at_another_place_in_the_block_differs() -> None:
    ids = [7] * 4
    assert hashes(ids, media=[image("aa", 0, 2)]) != hashes(ids, media=[image("aa", 1, 2)])


@given(st.text(), st.text(), st.text(), st.text())
def test_extras_are_injective(lora: str, salt: str, other_lora: str, other_salt: str) -> None:
    first = extra_keys_for_block(0, 4, lora=Adapter(lora, "1f"), salt=salt, media=())
    second = extra_keys_for_block(0, 4, lora=Adapter(other_lora, "1f"), salt=other_salt, media=())
    assert (first == second) == ((lora, salt) == (other_lora, other_salt))


def test_scope_separates_models_tokenizers_and_block_sizes() -> None:
    scopes = {
        route_scope("a", "b", 64),
        route_scope("ab", "", 64),
        route_scope("a", "c", 64),
        route_scope("a", "b", 16),
    }
    assert len(scopes) == 4
