"""A reservation lasts until a heartbeat counts it, or until the worker is dead for a minute."""

from tokenmesh.services.scheduler_svc.placement import Reservation, Reservations
from tokenmesh.shared.ids import WorkerId


def test_a_reservation_lasts_until_a_heartbeat_counts_it() -> None:
    reservations, worker = Reservations(settle_s=0.03), WorkerId("w")
    reservations.add(worker, Reservation(1.0, 100, 1, "a"))
    reservations.add(worker, Reservation(2.0, 10, 2, "b"))
    reservations.settle(worker, 1.02)
    assert (reservations.tokens(worker), reservations.streams(worker)) == (110, 3)
    reservations.settle(worker, 1.5)
    assert (reservations.tokens(worker), reservations.streams(worker, "a")) == (10, 0)
    reservations.settle(worker, 2.03)
    assert reservations.streams(worker) == 0


def test_reservations_of_workers_that_died_are_dropped() -> None:
    reservations = Reservations(settle_s=0.03)
    for number in range(1000):
        reservations.add(WorkerId(f"w{number}"), Reservation(float(number), 100, 1))
    remembered = [n for n in range(1000) if reservations.streams(WorkerId(f"w{n}"))]
    assert remembered == list(range(939, 1000))
