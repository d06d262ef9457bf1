"""How deep a body is nested is told before it is parsed, in time that its length bounds."""

import time

import pytest

from tokenmesh.services.gateway.body import check_depth
from tokenmesh.shared.errors import InvalidInput

LIMIT = 8


@pytest.mark.parametrize(
    "data",
    [
        b"[" * LIMIT + b"]" * LIMIT,
        b"[]" * 100,
        b'{"' + b"[" * 100 + b'": 1}',
        b'{"\\"' + b"[" * 100 + b'": 1}',
        b'["\\\\", ' + b'"{", ' * 100 + b"1]",
        # Not JSON, which is for the parser to say.
        b"[]" * 100 + b'"' + b"[" * 100,
        b"[]" * 100 + b'"' + b"[" * 100 + b"\\",
    ],
)
def test_brackets_in_strings_and_side_by_side_are_no_depth(data: bytes) -> None:
    check_depth(data, LIMIT)


@pytest.mark.parametrize("data", [b"[" * (LIMIT + 1), b'["\\"", ' + b'{"a": ' * LIMIT])
def test_too_deep_a_body_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="nested deeper than 8 levels"):
        check_depth(data, LIMIT)


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_string_without_an_end_is_read_once(end: bytes) -> None:
    data = b"[]" * 100 + b'"' + b'\\"' * 20_000 + end
    began_s = time.process_time()
    check_depth(data, LIMIT)
    assert time.process_time() - began_s < 0.5
