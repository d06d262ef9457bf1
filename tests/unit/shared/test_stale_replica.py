"""A replica of JetStream that is cut off or late answers reads: what it lacks is not deleted."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tokenmesh.shared.bus.jetstream import JetStreamJournal, StreamSpec
from tokenmesh.shared.bus.requests import RawReply
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Conflict, Unavailable

KEY = "t.a"
RECENT, LONG_AGO = int(0.4e9), int(5e9)


class Cluster:
    """Three replicas: what the one that answers reads has, and what the leader says."""

    def __init__(self, count: int, silent_ns: tuple[int, ...] = (RECENT, RECENT)) -> None:
        self.here: list[bytes] = []
        self.count = count
        self.silent_ns = silent_ns
        self.num_asked = 0
        self.on_info: Callable[[], object] = bool

    @property
    def journal(self) -> JetStreamJournal:
        spec = StreamSpec(
            name="t",
            subjects="t.>",
            max_age_s=60.0,
            max_bytes=1 << 20,
            setting="responses.max_total_bytes",
            max_entry_bytes=1 << 16,
            replicas=3,
        )
        settings = ResponseSettings(journal_timeout_s=1.0, journal_patience_s=0.12)
        return JetStreamJournal(cast("Any", SimpleNamespace(raw=self)), spec, settings)

    def _replies(self, first: int) -> list[RawReply]:
        return [
            RawReply(data, {"Nats-Sequence": str(number), "Nats-Last-Sequence": str(number - 1)})
            for number, data in enumerate(self.here, 1)
            if number >= first
        ]

    async def request(self, subject: str, data: bytes, **_: object) -> RawReply:
        if ".DIRECT.GET." in subject:
            return (self._replies(1) or [RawReply(b"", {"Status": "404"})])[-1]
        if subject == KEY:
            return RawReply(b'{"error": {"code": 400, "err_code": 10071}}', {})
        if ".STREAM.INFO." not in subject:
            return RawReply(b"{}", {})
        self.num_asked += 1
        assert msgspec.json.decode(data) == {"subjects_filter": KEY}
        replicas = [{"name": "n", "active": each} for each in self.silent_ns]
        answer = {
            "state": {"subjects": {KEY: self.count} if self.count else None},
            "cluster": {"leader": "l", "replicas": replicas},
        }
        self.on_info()
        return RawReply(msgspec.json.encode(answer), {})

    async def gather(
        self, _subject: str, data: bytes, **_: object
    ) -> tuple[list[RawReply], RawReply]:
        replies = self._replies(msgspec.json.decode(data)["seq"])
        for reply in replies[:1]:
            cast("dict[str, str]", reply.headers)["Nats-Last-Sequence"] = "0"
        return replies, RawReply(b"", {"Status": "204" if replies else "404"})


async def test_what_the_leader_does_not_have_either_is_absent() -> None:
    cluster = Cluster(count=0)
    assert await cluster.journal.last(KEY) is None
    assert await cluster.journal.read(KEY, 0, 1) == []


@pytest.mark.parametrize(
    ("count", "silent_ns"),
    [
        (1, (RECENT, RECENT)),
        (0, (LONG_AGO, LONG_AGO)),
    ],
    ids=["the leader has it", "the leader is cut off"],
)
async def test_what_only_this_replica_lacks_is_unavailable(
    count: int, silent_ns: tuple[int, ...]
) -> None:
    cluster = Cluster(count, silent_ns)
    with pytest.raises(Unavailable):
        await cluster.journal.last(KEY)
    with pytest.raises(Unavailable):
        await cluster.journal.read(KEY, 0, 1)


async def test_one_replica_of_three_may_be_away() -> None:
    assert await Cluster(0, (RECENT, LONG_AGO)).journal.last(KEY) is None


async def test_a_late_replica_is_asked_until_it_has_the_entry() -> None:
    cluster = Cluster(count=1)
    cluster.on_info = lambda: cluster.here.append(b"data")
    (entry,) = await cluster.journal.read(KEY, 0, 1)
    assert (entry.data, cluster.num_asked) == (b"data", 1)


async def test_the_end_of_a_log_that_is_read_whole_is_certain() -> None:
    cluster = Cluster(count=2)
    cluster.here = [b"one"]
    (first,) = await cluster.journal.read(KEY, 0, 5, 0)
    assert await cluster.journal.read(KEY, first.sequence, 5) == []
    with pytest.raises(Unavailable):
        await cluster.journal.read(KEY, first.sequence, 5, 1)
    cluster.here.append(b"two")
    assert [each.data for each in await cluster.journal.read(KEY, 1, 5, 1)] == [b"two"]
    assert await cluster.journal.read(KEY, 2, 5, 2) == []


async def test_an_append_that_was_stored_is_no_conflict_where_a_replica_is_late() -> None:
    cluster = Cluster(count=1)
    appended = b"mine"

    async def attempt(is_retry: bool) -> int:
        return await journal._append_once(KEY, appended, 0, is_retry)

    journal = cluster.journal
    with pytest.raises(Unavailable):
        await attempt(True)
    cluster.here.append(appended)
    assert await attempt(True) == 1
    cluster.here[0] = b"another's"
    with pytest.raises(Conflict):
        await attempt(True)
