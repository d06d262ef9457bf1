"""The cache holds what was used last, within its bytes."""

from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.services.mm_encoder_svc.embeddings import EmbeddingCache


def test_the_least_recently_used_leaves_first() -> None:
    cache = EmbeddingCache(max_bytes=3)
    for key in "abc":
        cache.add(key, b"x")
    assert cache.get("a") == b"x"
    cache.add("d", b"y")
    assert [cache.get(key) for key in "abcd"] == [b"x", None, b"x", b"y"]


def test_an_entry_over_the_bound_is_not_kept_and_takes_nothing_away() -> None:
    cache = EmbeddingCache(max_bytes=3)
    cache.add("a", b"x")
    cache.add("b", b"xxxx")
    assert (cache.get("a"), cache.get("b")) == (b"x", None)


def test_a_new_value_replaces_the_old_one() -> None:
    cache = EmbeddingCache(max_bytes=3)
    cache.add("a", b"xx")
    cache.add("a", b"yyy")
    assert (cache.get("a"), cache.num_bytes, len(cache)) == (b"yyy", 3, 1)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.binary(max_size=5))), st.integers(0, 12))
def test_bytes_are_counted_and_bounded(entries: list[tuple[str, bytes]], bound: int) -> None:
    cache = EmbeddingCache(bound)
    last: dict[str, bytes] = {}
    for key, blob in entries:
        cache.add(key, blob)
        last[key] = blob
        held = {name: found for name in "abcdef" if (found := cache.get(name)) is not None}
        assert sum(map(len, held.values())) == cache.num_bytes <= bound
        assert all(last[name] == found for name, found in held.items())
