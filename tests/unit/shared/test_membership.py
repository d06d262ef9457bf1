"""Membership: who counts as alive, from beats and times alone."""

from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.membership import ListenGap, MembershipView
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad

MISSED_BEATS = 4
INTERVAL_S = 0.25
LLAMA = ModelCard(
    name=ModelName("llama"), aliases=[ModelName("gpt-4o")], max_model_len=10, vocab_size=9
)


def beat(
    sequence: int = 1,
    instance_id: str = "worker-1",
    epoch: int = 1,
    service: str = "worker",
    draining: bool = False,
    leaving: bool = False,
    models: tuple[ModelCard, ...] = (LLAMA,),
    starts: tuple[ModelName, ...] = (),
) -> Heartbeat:
    return Heartbeat(
        service=service,
        instance_id=InstanceId(instance_id),
        epoch=epoch,
        sequence=sequence,
        version="0",
        draining=draining,
        leaving=leaving,
        interval_s=INTERVAL_S,
        models=list(models),
        load=WorkerLoad(running=sequence),
        starts=list(starts),
    )


def view(*beats: Heartbeat, max_members: int = 10) -> MembershipView:
    made = MembershipView(MISSED_BEATS, max_members)
    for each in beats:
        made.observe(each, 0.0)
    return made


def ids(members: MembershipView) -> set[str]:
    return {member.beat.instance_id for member in members.all()}


def test_a_process_is_missed_when_its_heartbeat_is_late_until_it_is_heard_again() -> None:
    members, late_s = view(beat()), 1.5 * INTERVAL_S + 0.001
    assert not members.misses_any("worker", 0.0, late_s - 0.002)
    assert members.misses_any("worker", 0.0, late_s)
    assert members.heard("worker", late_s) == []
    members.observe(beat(2), late_s)
    assert not members.misses_any("worker", 0.0, late_s)
    assert [each.beat.sequence for each in members.heard("worker", late_s)] == [2]


def test_a_lost_process_is_missed_by_what_was_asked_while_it_lived() -> None:
    members = view(beat())
    members.expire(9.0)
    assert members.lost(beat().instance_id, 1) == beat()
    assert members.misses_any("worker", 1.0, 9.0)
    assert not members.misses_any("worker", 5.0, 9.0)
    assert not members.misses_any("tokenizer", 0.0, 9.0)
    members.observe(beat(2), 9.1)
    assert members.lost(beat().instance_id, 1) is None
    assert not members.misses_any("worker", 0.0, 9.1)


def test_a_process_that_begins_a_new_life_has_lost_the_old_one_and_one_that_leaves_has_not() -> (
    None
):
    members = view(beat(), beat(epoch=2))
    assert members.lost(beat().instance_id, 1) == beat()
    members.observe(beat(2, epoch=2, leaving=True), 0.1)
    assert members.lost(beat().instance_id, 2) is None


def test_lost_processes_are_remembered_up_to_a_number() -> None:
    members = view(max_members=3)
    for number in range(9):
        members.observe(beat(instance_id=f"w{number}"), float(number * 10))
        members.expire(number * 10.0 + 9.0)
    known = [members.lost(InstanceId(f"w{number}"), 1) is not None for number in range(9)]
    assert known == [False] * 6 + [True] * 3


def test_a_silent_process_is_dead_after_four_missed_intervals() -> None:
    members = view(beat())
    assert members.expire(MISSED_BEATS * INTERVAL_S) == []
    (gone,) = members.expire(MISSED_BEATS * INTERVAL_S + 0.001)
    assert gone.beat == beat()
    assert members.all() == []


def test_each_beat_restarts_the_wait() -> None:
    members = view(beat(1))
    members.observe(beat(2), 0.9)
    assert members.expire(1.5) == []
    assert members.all()[0].last_seen == 0.9


def test_late_beats_of_the_same_epoch_are_ignored() -> None:
    members = view(beat(5), beat(3), beat(5))
    assert members.all()[0].beat.sequence == 5
    assert members.ignored == 2


def test_a_new_epoch_replaces_the_old_one_though_it_counts_from_one() -> None:
    members = view(beat(500, epoch=1), beat(1, epoch=2))
    assert [member.beat.epoch for member in members.all()] == [2]


def test_a_draining_process_stays_a_member() -> None:
    members = view(beat(1), beat(2, draining=True))
    assert [member.beat.draining for member in members.workers(LLAMA.name)] == [True]


def test_a_leaving_process_is_removed_at_once() -> None:
    members = view(beat(1), beat(2, instance_id="worker-2"), beat(2, leaving=True))
    assert ids(members) == {"worker-2"}


def test_a_last_beat_with_an_older_number_changes_nothing() -> None:
    assert ids(view(beat(5), beat(4, leaving=True))) == {"worker-1"}


def test_the_last_beat_of_an_earlier_epoch_changes_nothing() -> None:
    members = view(beat(9, epoch=1), beat(1, epoch=2), beat(10, epoch=1, leaving=True))
    assert [member.beat.epoch for member in members.all()] == [2]


def test_the_last_beat_of_an_unknown_process_adds_no_member() -> None:
    assert ids(view(beat(1, leaving=True))) == set()


def test_a_process_that_has_left_does_not_return_in_the_same_epoch() -> None:
    members = view(beat(1), beat(3, leaving=True), beat(2), beat(4))
    assert ids(members) == set()
    assert members.ignored == 2
    members.observe(beat(1, epoch=2), 0.0)
    assert ids(members) == {"worker-1"}


def test_what_has_left_is_remembered_even_where_it_was_not_known() -> None:
    assert ids(view(beat(2, leaving=True), beat(1), beat(3))) == set()


def test_the_memory_of_what_has_left_is_bounded() -> None:
    left = [beat(1, instance_id=f"worker-{number}", leaving=True) for number in range(5)]
    members = view(*left, max_members=3)
    for number in range(5):
        members.observe(beat(2, instance_id=f"worker-{number}"), 0.0)
    assert ids(members) == {"worker-0", "worker-1"}


def test_workers_are_found_by_name_and_alias() -> None:
    members = view(beat(), beat(instance_id="gateway-1", service="gateway", models=()))
    for name in ("llama", "gpt-4o"):
        assert [each.beat.instance_id for each in members.workers(ModelName(name))] == ["worker-1"]
    assert members.workers(ModelName("other")) == []
    assert [each.beat.instance_id for each in members.service("gateway")] == ["gateway-1"]


def test_the_view_is_bounded_and_keeps_its_members() -> None:
    members = view(*(beat(instance_id=f"worker-{number}") for number in range(5)), max_members=3)
    members.observe(beat(2, instance_id="worker-0"), 1.0)
    assert ids(members) == {"worker-0", "worker-1", "worker-2"}
    found = members.get(InstanceId("worker-0"))
    assert found is not None
    assert found.beat.sequence == 2


@given(st.lists(st.integers(1, 20), min_size=1))
def test_the_newest_beat_counts_in_any_order(sequences: list[int]) -> None:
    members = view(*(beat(sequence) for sequence in sequences))
    assert members.all()[0].beat.sequence == max(sequences)


def test_after_a_time_without_reading_no_instance_counts_as_dead() -> None:
    gap = ListenGap(max_gap_s=0.5, now=100.0)
    members = MembershipView(MISSED_BEATS, 10)
    members.observe(beat(1), 100.0, gap.note(100.0))
    members.observe(beat(1, instance_id="worker-2"), 100.0, gap.note(100.0))
    assert members.expire(130.0, gap.outage_s(130.0)) == []
    # The beat of one arrives before that of the other.
    members.observe(beat(2), 130.0, gap.note(130.0))
    assert members.expire(130.0, gap.outage_s(130.0)) == []
    for sequence in range(3, 6):
        now = 130.0 + (sequence - 2) * INTERVAL_S
        members.observe(beat(sequence), now, gap.note(now))
        members.expire(now, gap.outage_s(now))
    assert ids(members) == {"worker-1"}
    assert members.all()[0].last_seen == 130.75


def test_short_gaps_do_not_count_as_outages() -> None:
    gap = ListenGap(max_gap_s=0.5, now=100.0)
    for beats in range(1, 40):
        assert gap.note(100.0 + beats * 0.5) == 0.0


def returns(members: MembershipView, *beats: tuple[float, Heartbeat]) -> list[bool]:
    return [members.observe(each, at_s) for at_s, each in beats]


def test_a_process_returns_when_it_is_new_was_silent_or_has_started() -> None:
    late_s = 2 * INTERVAL_S + 0.01
    assert returns(
        MembershipView(MISSED_BEATS, 10),
        (0.0, beat(1)),
        (INTERVAL_S, beat(2)),
        (3 * INTERVAL_S, beat(3)),
        (3 * INTERVAL_S + late_s, beat(4)),
        (9.0, beat(1, epoch=2)),
        (9.0, beat(1, instance_id="worker-2", starts=(LLAMA.name,))),
        (9.1, beat(2, instance_id="worker-2")),
        (9.1, beat(2, instance_id="worker-2")),
        (9.2, beat(3, instance_id="worker-2", leaving=True)),
    ) == [True, False, False, True, True, False, True, False, False]


def test_a_process_that_loads_its_models_is_no_member_yet() -> None:
    members = view(beat(starts=(LLAMA.name,)))
    assert (members.all(), members.service("worker"), members.workers(LLAMA.name)) == ([], [], [])
    assert members.get(InstanceId("worker-1")) is None
    assert [each.beat.starts for each in members.starting("worker")] == [[LLAMA.name]]
    members.observe(beat(2), 0.1)
    assert (ids(members), members.starting("worker")) == ({"worker-1"}, [])


def test_a_process_that_dies_while_it_loads_its_models_does_not_start_for_ever() -> None:
    members = view(beat(starts=(LLAMA.name,)))
    members.expire(MISSED_BEATS * INTERVAL_S + 0.001)
    assert members.starting("worker") == []


LOAD = (LLAMA.name,)


def failing(num_lives: int, at_s: float = 0.0) -> MembershipView:
    """A worker in its last of so many lives, none of which has loaded its model."""
    members = MembershipView(MISSED_BEATS, 10)
    for epoch in range(num_lives):
        members.observe(beat(epoch=epoch, starts=LOAD), at_s)
    return members


def test_a_worker_that_has_failed_to_start_three_times_is_not_starting() -> None:
    for num_lives, expected in ((1, True), (3, True), (4, False)):
        members = failing(num_lives)
        assert members.is_starting("worker", 0.1) is expected
        assert members.is_starting("worker", 0.1, LLAMA.name) is expected
        assert not members.is_starting("worker", 0.1, ModelName("other"))
        assert not members.is_starting("tokenizer", 0.1)


def test_starts_that_failed_count_in_every_way_to_end_and_for_an_hour() -> None:
    members = view(beat(starts=LOAD), beat(instance_id="worker-2", starts=LOAD))
    members.observe(beat(2, instance_id="worker-2", leaving=True, starts=LOAD), 0.0)
    members.expire(MISSED_BEATS * INTERVAL_S + 0.1)
    members.observe(beat(instance_id="worker-3", starts=LOAD), 4.0)
    members.observe(beat(instance_id="worker-3", epoch=2, starts=LOAD), 4.0)
    assert not members.is_starting("worker", 4.0)
    assert members.is_starting("worker", 3700.0)


def test_a_worker_that_loads_its_model_makes_up_for_what_failed() -> None:
    members = failing(4)
    members.observe(beat(2, epoch=3), 0.1)
    members.observe(beat(epoch=4, starts=LOAD), 0.2)
    assert members.is_starting("worker", 0.2)


def test_a_worker_that_was_silent_while_it_loads_has_not_failed() -> None:
    members = view(beat(starts=LOAD))
    for number in range(2, 8):
        members.expire(number * 10.0 - 1)
        members.observe(beat(number, starts=LOAD), number * 10.0)
        assert members.is_starting("worker", number * 10.0)


def test_failed_starts_are_bounded_in_memory() -> None:
    members = failing(30)
    assert len(members._failed._lives) == 10
