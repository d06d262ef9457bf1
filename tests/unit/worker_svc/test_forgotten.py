"""Forgotten: how old reservations are, by the worker's clock."""

from tokenmesh.services.worker_svc.prefix_index.indexed import ExpiredReservations


def test_what_was_seen_long_ago_and_is_still_there_is_forgotten() -> None:
    forgotten = ExpiredReservations(30.0, 100)
    assert forgotten.look(["a", "b"], 100.0) == []
    assert forgotten.look(["a", "c"], 129.0) == []
    assert forgotten.look(["a", "c"], 130.0) == ["a"]
    assert forgotten.look(["b", "c"], 159.0) == ["c"]


def test_a_returning_client_is_new() -> None:
    forgotten = ExpiredReservations(30.0, 100)
    forgotten.look(["a"], 0.0)
    forgotten.look([], 10.0)
    assert forgotten.look(["a"], 30.0) == []


def test_no_more_are_remembered_than_allowed() -> None:
    forgotten = ExpiredReservations(5.0, 3)
    many = [str(number) for number in range(9)]
    forgotten.look(many, 0.0)
    assert forgotten.look(many, 5.0) == ["0", "1", "2"]
    assert forgotten.look(many[3:], 6.0) == []
    assert forgotten.look(many[3:], 11.0) == ["3", "4", "5"]
