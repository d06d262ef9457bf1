"""Chats of the chaos program at gateways that may die: what one has begun is asked again."""

from random import Random
from typing import Any

import pytest

from benchmarks.chaos_run.accounts import ROAMER, TENANTS, servers_of
from benchmarks.chaos_run.faults import draw
from benchmarks.chaos_run.recorded import Chat, Chats
from benchmarks.chaos_run.streams import Streams
from tests.fakes.scripted_http import DONE, event, plain, serving, stream
from tokenmesh.cli.bench.client import Target

CHAT = Chat({"messages": []}, [{"text": "abcd", "finish": "length"}], 4)
DRAINING = {"error": {"code": "draining", "message": "The gateway is draining."}}


def piece(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
WHOLE = stream([piece("ab"), piece("cd", "length"), USAGE, DONE])
FAREWELL = stream([piece("abc"), event(DRAINING), DONE])


async def received_of(first: bytes, *, asks_again: bool = True) -> tuple[set[str], list[str]]:
    """Faults and moves of a chat whose first answer is this one, and whose next one is right."""
    answers = [first, WHOLE]

    def answer(_path: str, _body: dict[str, Any]) -> bytes:
        return answers.pop(0)

    async with serving(answer) as url:
        chats = Chats({ROAMER: [Target(url, ROAMER)]}, [CHAT], Random(1), asks_again=asks_again)
        streams = Streams({chats: 1}, Random(1), timeout_s=5)
        await streams.run(1, lambda: not streams.received)
    return set(streams.faults), streams.received[0].moves


@pytest.mark.parametrize(
    ("first", "moves"),
    [
        (WHOLE, []),
        (b"", ["chat ConnectionError"]),
        (FAREWELL, ["chat stream_draining"]),
        (plain(503, DRAINING), ["chat draining"]),
    ],
    ids=["whole", "cut", "farewell", "draining"],
)
async def test_a_gateway_that_leaves_is_no_fault(first: bytes, moves: list[str]) -> None:
    assert await received_of(first) == (set(), moves)


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        (stream([piece("ax"), event(DRAINING), DONE]), "wrong_beginning"),
        (stream([piece("abcd"), DONE]), "truncated"),
        (stream([piece("abce", "length"), USAGE, DONE]), "wrong_text"),
        (plain(503, {"error": {"code": "overloaded"}}), "http_503"),
    ],
    ids=["wrong before it left", "without an end", "wrong", "failed"],
)
async def test_anything_else_is_one(first: bytes, fault: str) -> None:
    assert await received_of(first) == ({f"Chats: {fault}"}, [])


async def test_at_gateways_that_do_not_die_nothing_is_asked_again() -> None:
    found, _ = await received_of(FAREWELL, asks_again=False)
    assert found == {"Chats: stream_draining"}


def test_gateways_die_more_often_where_kv_is_on_its_way_and_their_clients_are_not_audited() -> None:
    def deaths(*, moves_kv: bool) -> int:
        drawn = draw(Random(1), 1000, moves_kv=moves_kv)
        return drawn.count(("kill", "responder")) + drawn.count(("terminate", "responder"))

    assert deaths(moves_kv=True) > 2 * deaths(moves_kv=False)
    assert ROAMER not in TENANTS
    assert [*servers_of(["http://127.0.0.1:1"], (ROAMER,))] == [ROAMER]
