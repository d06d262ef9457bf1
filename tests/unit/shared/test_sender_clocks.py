"""Deadlines of senders whose clocks are off, and of messages that lay somewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.shared.bus.headers import SenderClocks, bounded, pack, unpack
from tokenmesh.shared.errors import ProtocolError

WALL = 1_700_000_000.0
SKEWS = st.floats(-3600, 3600)


@given(skew=SKEWS, ways=st.lists(st.floats(0.0001, 0.01), min_size=1, max_size=20))
def test_the_offset_is_the_difference_of_the_clocks(skew: float, ways: list[float]) -> None:
    clocks = SenderClocks()
    for second, way in enumerate(ways):
        sent_at = WALL + second
        offset = clocks.offset_s("a", sent_at + skew, sent_at + way, second)
        assert offset == pytest.approx(min(ways[: second + 1]) - skew, abs=1e-4)


@given(skew=SKEWS, lay=st.floats(1, 600))
def test_a_message_that_lay_somewhere_keeps_its_deadline(skew: float, lay: float) -> None:
    clocks = SenderClocks()
    clocks.offset_s("a", WALL + skew, WALL + 0.001, 0.0)
    deadline = WALL + 10 + skew + 5.0
    offset = clocks.offset_s("a", WALL + 10 + skew, WALL + 10 + lay, 10 + lay)
    assert deadline + offset == pytest.approx(WALL + 15.0, abs=0.01)


def test_a_clock_that_is_set_back_is_believed_after_two_windows() -> None:
    clocks = SenderClocks(window_s=10.0)
    for second in range(40):
        clock = WALL + second - (300 if second >= 5 else 0)
        offset = clocks.offset_s("a", clock, WALL + second, second)
    assert offset == pytest.approx(300)


def test_a_clock_that_is_set_forward_is_believed_at_once() -> None:
    clocks = SenderClocks()
    assert clocks.offset_s("a", WALL, WALL, 0) == 0
    assert clocks.offset_s("a", WALL + 300, WALL, 1) == -300


def test_senders_are_apart_and_bounded() -> None:
    clocks = SenderClocks(max_senders=2)
    assert clocks.offset_s("a", WALL - 60, WALL, 0) == 60
    assert clocks.offset_s("b", WALL, WALL, 0) == 0
    assert (clocks.is_news("a"), clocks.is_news("a")) == (True, False)
    clocks.offset_s("c", WALL, WALL, 0)
    assert clocks.offset_s("a", WALL, WALL, 0) == 0


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "soon", ""])
@pytest.mark.parametrize("name", ["tm-deadline", "tm-sent"])
def test_a_time_that_is_no_number_is_refused(name: str, text: str) -> None:
    with pytest.raises(ProtocolError, match=name):
        unpack(pack(unpack(None)) | {name: text})


def test_the_year_ten_thousand_is_bounded() -> None:
    assert bounded(1e300, WALL) == WALL + 7 * 86400
    assert bounded(WALL + 5, WALL) == WALL + 5
