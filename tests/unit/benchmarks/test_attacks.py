"""The attacks are requests as they are meant to be, and the bars judge what others notice."""

import asyncio
import contextlib
import json
import math

import pytest

from benchmarks.attacks_run.attacker import Requests, SilentConnections, attack
from benchmarks.attacks_run.lag import LagBuckets, lag_buckets
from benchmarks.attacks_run.requests import BARE, BODIES, READS, TEXTS, request
from benchmarks.attacks_run.score import Noticed, p99, score, table
from benchmarks.serve.memory import title_of

QUIET = Noticed([0.01] * 100, [0.02] * 100 + [0.6], {"a 1": 100.0, "b 2": 50.0})


@pytest.mark.parametrize("name", [*BARE, *BODIES, *TEXTS, *READS])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_request_has_its_key_and_the_length_it_tells(name: str, key: str | None) -> None:
    head, _, body = request(name, "m", key).partition(b"\r\n\r\n")
    if name in BODIES or name in TEXTS:
        assert b"Content-Length: %d" % len(body) in head
        assert len(body) <= 25 * 2**20
        assert (b"Authorization: Bearer k" in head) == (key is not None)
    else:
        assert name in BARE or head.startswith(b"GET /")


@pytest.mark.parametrize(
    "name",
    ["prompt of -1", "regex bombs", "batch of regex bombs", "8 MiB text", *TEXTS],
)
def test_bodies_that_shall_be_json_are_json(name: str) -> None:
    assert json.loads({**BODIES, **TEXTS}[name][1]("m"))["model"] == "m"


def test_what_holds_all_bars_has_no_failures() -> None:
    noticed = Noticed(
        [0.02] * 100 + [0.9], [0.6] + [0.1] * 9, {"a 1": 140.0, "b 2": 50.0, "c": 9.0}
    )
    found = score("x", QUIET, noticed, 3)
    assert found.failures() == []
    assert (found.long_gaps, found.long_gaps_without, found.grown) == (1, 1, "a 1")
    assert found.growths == {"a 1": 1.4, "b 2": 1.0}
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


METRICS = """
tokenmesh:event_loop_lag_seconds_bucket{le="0.01"} %d
tokenmesh:event_loop_lag_seconds_bucket{le="0.05"} %d
tokenmesh:event_loop_lag_seconds_bucket{le="+Inf"} %d
"""


def test_the_lag_of_a_phase_is_what_its_metrics_grew_by() -> None:
    before, after = lag_buckets(METRICS % (500, 500, 500)), lag_buckets(METRICS % (590, 599, 600))
    phase = after.since(before)
    assert (phase.at(0.9), phase.at(0.99), phase.at(1.0)) == (0.01, 0.05, math.inf)
    assert before.since(before).at(0.99) == LagBuckets({}).at(0.99) == 0.0


def test_metrics_without_the_lag_are_an_error() -> None:
    with pytest.raises(ValueError, match="event_loop_lag_seconds"):
        lag_buckets("HTTP/1.1 403 Forbidden")


# asyncio drops a connection that is cancelled while it opens without closing its writer
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_attackers_open_connection_after_connection() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                if await reader.read(2) == b"ab":
                    writer.write(b"x")
        finally:
            writer.transport.abort()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        requests = Requests(port, b"ab")
        await attack(requests.again, 2, 0.5)
        assert requests.num_answered > 0
        silent = SilentConnections(port)
        await attack(silent.again, 2, 0.5)
        assert silent.num_answered > 0
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (["/x/valkey-server 127.0.0.1:18623"], "valkey-server"),
        (["/x/nats-server", "-c", "/y/nats.conf"], "nats-server"),
        (["python", "/x/tokenmesh", "serve", "gateway"], "tokenmesh serve gateway"),
        (["python", "other.py"], ""),
    ],
)
def test_the_processes_of_a_mesh_are_known_by_their_titles(words: list[str], title: str) -> None:
    assert title_of(words) == title


def test_a_percentile_of_nothing_is_0() -> None:
    assert p99([]) == 0.0
    assert p99(range(101)) == 99
