"""The attacks are requests as they are meant to be, and the bars judge what others notice."""

import json

import pytest

from benchmarks.attacks_run.requests import BARE, BODIES, NAMES, request
from benchmarks.attacks_run.score import Noticed, p99, score, table

QUIET = Noticed([0.01] * 100, [0.02] * 100 + [0.6], {"a 1": 100.0, "b 2": 50.0})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", [None, "k"])
def test_a_request_has_its_key_and_the_length_it_tells(name: str, key: str | None) -> None:
    head, _, body = request(name, "m", key).partition(b"\r\n\r\n")
    if name in BODIES:
        assert b"Content-Length: %d" % len(body) in head
        assert len(body) <= 25 * 2**20
        assert (b"Authorization: Bearer k" in head) == (key is not None)
    else:
        assert name in BARE


@pytest.mark.parametrize(
    "name", ["prompt of -1", "regex bombs", "batch of regex bombs", "8 MiB text"]
)
def test_bodies_that_shall_be_json_are_json(name: str) -> None:
    assert json.loads(BODIES[name][1]("m"))["model"] == "m"


def test_what_holds_all_bars_has_no_failures() -> None:
    noticed = Noticed(
        [0.02] * 100 + [0.9], [0.6] + [0.1] * 9, {"a 1": 140.0, "b 2": 50.0, "c": 9.0}
    )
    found = score("x", QUIET, noticed, 3)
    assert found.failures() == []
    assert (found.long_gaps, found.long_gaps_without, found.grown) == (1, 1, "a 1")
    assert table([found]).splitlines()[1].endswith("ok")


@pytest.mark.parametrize(
    ("noticed", "failure"),
    [
        (Noticed([0.3] * 9, [], {}), "livez p99 0.300 s"),
        (Noticed([], [0.6, 0.7], {}), "2 gaps over 0.5 s"),
        (Noticed([], [], {"a 1": 151.0}), "a 1 grew 1.51x"),
        (Noticed([], [], {}, num_errors=2), "2 errors"),
    ],
)
def test_each_bar_can_fail(noticed: Noticed, failure: str) -> None:
    found = score("x", QUIET, noticed, 0)
    assert found.failures() == [failure]
    assert found.as_json()["failures"] == [failure]


def test_a_percentile_of_nothing_is_0() -> None:
    assert p99([]) == 0.0
    assert p99(range(101)) == 99
