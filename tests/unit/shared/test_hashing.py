"""Route-block hashes: chained, tagged, and equal only for equal prefixes."""

import hashlib

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.shared.embeds_keys import embeds_keys
from tokenmesh.shared.hashing import (
    HASH_BYTES,
    Adapter,
    extra_keys_for_block,
    extra_keys_of,
    route_hashes,
    route_scope,
)
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.blocks import ExtraKey
from tokenmesh.shared.messages.media import EMBEDS, MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob
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


def test_embeddings_count_block_by_block() -> None:
    """Each block has the hash of its own rows, which is SHA-256 of what the client has sent."""
    rows = [bytes([row]) * 8 for row in range(9)]
    item = MediaItem(kind=EMBEDS, content_hash="e", offset=6, length=9, pixels=BlobKey("e"))
    keys = embeds_keys(
        [image("i", 0, 2), item], {"e": TensorBlob("float32", (9, 2), b"".join(rows))}, 4
    )
    wanted = {4: (rows[:2], 2), 8: (rows[2:6], 0), 12: (rows[6:], 0)}
    assert keys == {
        start: [
            ExtraKey(
                kind="prompt_embeds",
                value=f"float32:{hashlib.sha256(b''.join(found)).hexdigest()}",
                offset=offset,
            )
        ]
        for start, (found, offset) in wanted.items()
    }
    found = [
        extra_keys_of(at, at + 4, lora=None, salt=None, media=[image("i", 0, 2), item], embeds=keys)
        for at in range(0, 20, 4)
    ]
    assert [[key.kind for key in each] for each in found] == [
        *(["media"], ["prompt_embeds"], ["prompt_embeds"], ["prompt_embeds"], [])
    ]


def test_tensors_that_begin_alike_share_their_first_blocks_and_types_do_not() -> None:
    def hashed(data: bytes, dtype: str = "float16") -> list[bytes]:
        length = len(data) // 2
        item = MediaItem(kind=EMBEDS, content_hash="e", offset=0, length=length, pixels=BlobKey(""))
        keys = embeds_keys([item], {"e": TensorBlob(dtype, (length, 1), data)}, 4)
        return [
            extra_keys_for_block(at, at + 4, lora=None, salt=None, media=[item], embeds=keys)
            for at in range(0, length, 4)
        ]

    one, other = hashed(b"aabbccddeeff"), hashed(b"aabbccddeegg" + b"hh" * 4)
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert hashed(b"aabbccdd")[0] != hashed(b"aabbccdd", "bfloat16")[0]
