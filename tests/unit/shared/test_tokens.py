"""Token ids as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.shared.tokens import count_ids, pack_ids, unpack_ids

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=50)


@given(IDS)
def test_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert count_ids(pack_ids(ids)) == len(ids)


def test_bytes_are_little_endian_whatever_the_host() -> None:
    assert pack_ids([1, 0x01020304]) == b"\x01\x00\x00\x00\x04\x03\x02\x01"


def test_half_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"\x01\x00\x00\x00\x02")


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_numbers_that_are_no_ids_are_refused(wrong: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([wrong])
