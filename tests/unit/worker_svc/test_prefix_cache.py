"""PrefixCache: what counts as equal, and what is never found."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmesh.engine.kv.block_pool import (
    HASH_BYTES,
    BlockPool,
    KvGroups,
)
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.request.request import Request
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import MediaItem

MakeRequest = Callable[..., Request]
PROMPT = list(range(100, 114))
SIZE = 4


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(32, KvGroups(SIZE), enabled=True)


@pytest.fixture
def pool(cache: PrefixCache) -> BlockPool:
    return cache.pool


def compute(cache: PrefixCache, pool: BlockPool, request: Request) -> Request:
    """Let a request hold and register all of its prompt."""
    cache.keys.choose_side(request)
    request.kv.blocks = pool.allocate(-(-request.num_known // SIZE))
    cache.register(request, 0, request.num_known)
    return request


def image(content_hash: str, offset: int) -> MediaItem:
    return MediaItem(
        kind="image", content_hash=content_hash, offset=offset, length=5, pixels=BlobKey("p")
    )


def test_an_equal_prompt_finds_all_full_blocks(
    cache: PrefixCache, pool: BlockPool, make_request: MakeRequest
) -> None:
    first = compute(cache, pool, make_request(1, PROMPT))
    assert cache.find(make_request(2, PROMPT))[0] == first.kv.blocks[:3]
    assert cache.find(make_request(3, [*PROMPT[:9], 5, 5, 5, 5]))[0] == first.kv.blocks[:2]
    assert cache.find(make_request(4, [1, *PROMPT]))[0] == []


def test_pages_of_another_type_are_other_blocks(make_request: MakeRequest) -> None:
    hashes = []
    for number, kv_code in enumerate(("", "int8", "fp8_e4m3", "fp8_e5m2")):
        cache = PrefixCache(32, KvGroups(SIZE), enabled=True, kv_code=kv_code)
        first = compute(cache, cache.pool, make_request(number, PROMPT))
        assert cache.find(make_request(10 + number, PROMPT))[0] == first.kv.blocks[:3]
        hashes += first.kv.hashes
    assert len(set(hashes)) == 4 * 3


def test_the_last_token_is_always_left_to_compute(
    cache: PrefixCache, pool: BlockPool, make_request: MakeRequest
) -> None:
    first = compute(cache, pool, make_request(1, PROMPT))
    assert cache.find(make_request(2, PROMPT[:8]))[0] == first.kv.blocks[:1]
    assert cache.find(make_request(3, PROMPT[:9]))[0] == first.kv.blocks[:2]


def test_only_blocks_within_the_scheduled_chunk_are_found(
    cache: PrefixCache, pool: BlockPool, make_request: MakeRequest
) -> None:
    first = make_request(1, PROMPT)
    first.kv.blocks = pool.allocate(4)
    cache.register(first, 0, 7)
    assert cache.find(make_request(2, PROMPT))[0] == first.kv.blocks[:1]
    cache.register(first, 7, 8)
    assert cache.find(make_request(2, PROMPT))[0] == first.kv.blocks[:2]


def test_retracted_blocks_are_not_found(
    cache: PrefixCache, pool: BlockPool, make_request: MakeRequest
) -> None:
    first = make_request(1, PROMPT)
    first.kv.blocks = pool.allocate(4)
    first.place.row = 3
    cache.register(first, 0, 5)
    registered = cache.register(first, 5, 14)
    assert cache.retract(registered, row=2) == []
    assert cache.retract(registered, row=3) == first.kv.blocks[1:3]
    assert cache.find(make_request(2, PROMPT))[0] == first.kv.blocks[:1]


def test_a_block_with_other_content_by_now_is_found_after_a_retraction(
    cache: PrefixCache, pool: BlockPool, make_request: MakeRequest
) -> None:
    first = make_request(1, PROMPT)
    first.place.row, first.kv.blocks = 3, pool.allocate(1)
    registered = cache.register(first, 0, 4)
    pool.free(first.kv.blocks)
    pool.forget(first.kv.blocks[0])
    second = make_request(2, PROMPT[4:])
    second.kv.blocks = first.kv.blocks
    cache.register(second, 0, 4)
    # it counts as one that others may have read before it was given away
    assert cache.retract(registered, row=3) == first.kv.blocks
    assert cache.find(make_request(3, PROMPT[4:]))[0] == second.kv.blocks


def test_a_block_is_not_registered_before_its_tokens_are_known(
    cache: PrefixCache, pool: BlockPool, make_request: MakeRequest
) -> None:
    first = make_request(1, PROMPT[:7])
    first.kv.blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="before its tokens are known"):
        cache.register(first, 4, 8)


@pytest.mark.parametrize(
    ("one", "other", "num_shared"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "a"}, 3),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {}, 0),
        ({"lora": Adapter("a", "1f")}, {"lora": Adapter("a", "1f")}, 3),
        ({"lora": Adapter("a", "1f")}, {"lora": Adapter("b", "1f")}, 0),
        ({"lora": Adapter("a", "1f")}, {"lora": Adapter("a", "2e")}, 0),
        ({"lora": Adapter("a", "1f")}, {"cache_salt": "a@1f"}, 0),
        # on the two sides of a rope boundary, and a client's salt that looks like the mark of one
        ({"rope_boundary": 4}, {"rope_boundary": 4}, 3),
        ({"rope_boundary": 4}, {"rope_boundary": 400}, 0),
        ({"rope_boundary": 4}, {"rope_boundary": 400, "cache_salt": "long: "}, 0),
        ({"rope_boundary": 400}, {}, 3),
        ({"media": [image("aa", 5)]}, {"media": [image("aa", 5)]}, 3),
        ({"media": [image("aa", 5)]}, {"media": [image("ab", 5)]}, 1),
        ({"media": [image("aa", 5)]}, {"media": [image("aa", 6)]}, 1),
        ({"media": [image("aa", 5)]}, {}, 1),
    ],
)
def test_what_is_not_in_the_tokens_counts_from_where_it_begins(
    cache: PrefixCache,
    pool: BlockPool,
    make_request: MakeRequest,
    one: dict[str, Any],
    other: dict[str, Any],
    num_shared: int,
) -> None:
    first = compute(cache, pool, make_request(1, PROMPT, **one))
    assert cache.find(make_request(2, PROMPT, **other))[0] == first.kv.blocks[:num_shared]


def test_output_tokens_are_found_like_prompt_tokens(
    cache: PrefixCache, pool: BlockPool, make_request: MakeRequest
) -> None:
    first = compute(cache, pool, make_request(1, PROMPT[:3], tuple(PROMPT[3:9])))
    assert cache.find(make_request(2, PROMPT))[0] == first.kv.blocks[:2]


def test_prompt_logprobs_need_every_position_computed(
    cache: PrefixCache, pool: BlockPool, make_request: MakeRequest
) -> None:
    first = compute(cache, pool, make_request(1, PROMPT))
    asking = make_request(2, PROMPT, sampling={"prompt_logprobs": 1})
    assert cache.find(asking)[0] == []
    asking.output.wants_prompt_logprobs = False
    assert cache.find(asking)[0] == first.kv.blocks[:3]


def test_a_disabled_cache_finds_nothing(make_request: MakeRequest) -> None:
    cache = PrefixCache(32, KvGroups(SIZE), enabled=False)
    compute(cache, cache.pool, make_request(1, PROMPT))
    assert cache.find(make_request(2, PROMPT))[0] == []
    assert cache.pool.num_cached == 0


Blocks = tuple[list[int], str | None]
blocks = st.tuples(
    st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), min_size=2 * SIZE, max_size=2 * SIZE),
    st.sampled_from([None, "a", "b"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=blocks, other=blocks)
def test_different_blocks_have_different_hashes(
    cache: PrefixCache, make_request: MakeRequest, one: Blocks, other: Blocks
) -> None:
    (ours, theirs) = (make_request(1, ids, cache_salt=salt) for ids, salt in (one, other))
    for request in (ours, theirs):
        cache.keys.hash_up_to(request, 2)
        assert [len(each) for each in request.kv.hashes] == [HASH_BYTES] * 2
    assert (ours.kv.hashes == theirs.kv.hashes) == (one == other)
