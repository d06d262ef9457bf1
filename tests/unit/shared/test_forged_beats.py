"""Beats that no process of ours sends: counted, harmless; other protocols: left out and shown."""

from math import inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.shared.test_membership import LLAMA, beat
from tokenmesh.shared import codec
from tokenmesh.shared.bus.base import Envelope, Headers
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.membership import Foreigners, Members, MembershipView, check_beat
from tokenmesh.shared.messages import Heartbeat, Ping
from tokenmesh.shared.messages.beat import PROTOCOL, WorkerLoad
from tokenmesh.shared.subjects import beat as beat_subject

change = msgspec.structs.replace
FORGED = {
    "interval": [change(beat(), interval_s=each) for each in (0.0, -1.0, nan, inf, 1e9)],
    "load": [
        change(beat(), load=load)
        for load in (
            WorkerLoad(running=-1),
            WorkerLoad(queued_tokens=2**63),
            WorkerLoad(prefill_tokens_per_s=nan),
            WorkerLoad(prefill_tokens_per_s=-1.0),
            WorkerLoad(step_s=inf),
        )
    ],
    "model": [
        change(beat(), models=[change(LLAMA, max_model_len=-1)]),
        change(beat(), models=[change(LLAMA, name=ModelName("x" * 5000))]),
        change(beat(), models=[LLAMA] * 1000),
    ],
}


def heard(members: Members, message: Heartbeat | Ping, subject: str = "") -> None:
    """Hand a message to the members as the bus does."""
    if isinstance(message, Heartbeat) and not subject:
        subject = beat_subject(message.service, message.instance_id)
    envelope = Envelope(subject, message, Headers())
    try:
        members._on_beat(envelope).send(None)
    except StopIteration:
        return


@pytest.fixture
def members() -> Members:
    return Members(MembershipView(4, 10))


@pytest.mark.parametrize("forged", [each for kind in FORGED.values() for each in kind])
def test_a_beat_that_cannot_be_is_refused_and_the_known_one_stays(
    members: Members, forged: Heartbeat
) -> None:
    heard(members, beat())
    with pytest.raises(ProtocolError):
        heard(members, change(forged, sequence=99))
    assert members.get(beat().instance_id) is not None
    assert members.get(beat().instance_id).beat == beat()  # type: ignore[union-attr]


def test_a_beat_on_the_subject_of_another_instance_is_refused(members: Members) -> None:
    with pytest.raises(ProtocolError, match="subject"):
        heard(members, beat(), "tm.beat.worker.worker-2")
    with pytest.raises(ProtocolError, match="Ping instead"):
        heard(members, Ping(), "tm.beat.worker.worker-2")
    assert members.all() == []


def test_another_major_protocol_is_left_out_with_one_warning(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    other = change(beat(instance_id="worker-9"), protocol=PROTOCOL + 1)
    # what its fields mean is not known
    for sequence in range(1, 5):
        heard(members, change(other, sequence=sequence, interval_s=-1.0))
    assert members.all() == []
    assert [each.instance_id for each in members.foreign.all(0.0)] == ["worker-9"]
    assert len([each for each in caplog.records if "protocol" in each.message]) == 1


def test_other_minor_versions_work_together(members: Members) -> None:
    raw = msgspec.msgpack.decode(codec.encode(change(beat(), version="0.9.7")))
    raw["field_of_tomorrow"] = {"x": [1]}
    raw["load"]["another"] = 1.5
    newer = codec.decode(msgspec.msgpack.encode(raw))
    assert isinstance(newer, Heartbeat)
    heard(members, newer)
    assert [each.beat.version for each in members.all()] == ["0.9.7"]
    raw.pop("load")
    raw["instance_id"] = "worker-2"
    older = codec.decode(msgspec.msgpack.encode(raw))
    assert isinstance(older, Heartbeat)
    heard(members, older)
    assert len(members.workers(LLAMA.name)) == 2


def test_a_beat_without_a_protocol_is_of_the_first(members: Members) -> None:
    """Old bytes mean the default: with a higher one, incompatible versions look compatible."""
    (protocol,) = [each for each in msgspec.structs.fields(Heartbeat) if each.name == "protocol"]
    assert protocol.default == 1


def test_instances_with_another_protocol_are_bounded_and_forgotten() -> None:
    foreign = Foreigners(limit=3, memory_s=10.0)
    are_new = [foreign.note(beat(instance_id=f"w-{number}"), 0.0) for number in range(5)]
    assert are_new == [True, True, True, False, False]
    assert len(foreign.all(9.0)) == 3
    assert foreign.note(beat(instance_id="w-1"), 9.0) is False
    assert [each.instance_id for each in foreign.all(12.0)] == ["w-1"]
    foreign.note(beat(instance_id="w-1", leaving=True), 12.0)
    assert foreign.all(12.0) == []


@given(
    load=st.builds(
        WorkerLoad,
        running=st.integers(-(2**63), 2**63 - 1),
        kv_blocks_total=st.integers(-(2**63), 2**63 - 1),
        prefill_tokens_per_s=st.floats(),
        step_s=st.floats(),
    ),
    interval_s=st.floats(),
    name=st.text(max_size=8),
)
def test_any_beat_is_stored_or_refused_with_a_protocol_error(
    load: WorkerLoad, interval_s: float, name: str
) -> None:
    forged = change(beat(), load=load, interval_s=interval_s, instance_id=InstanceId(name))
    try:
        check_beat(forged, beat_subject(forged.service, forged.instance_id))
    except ProtocolError:
        return
    assert 0 < forged.interval_s <= 60
    assert load.running >= 0
    assert load.prefill_tokens_per_s >= 0
