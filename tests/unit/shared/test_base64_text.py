"""Base64 in windows is what the standard library reads at once."""

from base64 import b64decode, b64encode

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tokenmesh.shared import base64_text
from tokenmesh.shared.base64_text import decode_base64


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64_text, "_WINDOW", 8)


def of_library(text: str) -> bytes | None:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return None


def in_windows(text: str) -> bytes | None:
    try:
        return decode_base64(text)
    except ValueError:
        return None


@given(st.binary(max_size=40))
def test_bytes_come_back(data: bytes) -> None:
    assert decode_base64(b64encode(data).decode()) == data


@given(st.text("AQg/+=é\n ", max_size=24))
@example("AAAAAAA=AAAAAAAA")
@example("AAAAAA==" * 2)
@example("AAAAAAAA=")
def test_every_text_is_read_or_refused_as_by_the_library(text: str) -> None:
    assume(not text.endswith("==="))  # the library ignores any number of them after whole groups
    assert in_windows(text) == of_library(text)
