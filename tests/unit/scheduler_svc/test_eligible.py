"""Whom a placement leaves out, and for how long it can afford that."""

import pytest

from tokenmesh.services.scheduler_svc.placement import Placement, Worker
from tokenmesh.shared.config.scheduler import SchedulerSettings
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.messages.place import Place

WORKERS = [Worker(WorkerId(name), 1, WorkerLoad(max_num_seqs=9), False, 0.0) for name in "abc"]


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("", "abc"),
        ("b", "ac"),
        ("ba", "c"),
        # All have failed: not the last one to do so again.
        ("bac", "ac"),
        ("xabc", "abc"),
    ],
)
def test_who_failed_last_is_left_out_the_longest(exclude: str, expected: str) -> None:
    request = Place(
        request_id=RequestId("r"),
        model=ModelName("m"),
        num_tokens=1,
        max_tokens=1,
        exclude=[WorkerId(name) for name in exclude],
    )
    found = Placement(SchedulerSettings()).eligible(request, WORKERS)
    assert "".join(each.worker_id for each in found) == expected


def test_a_sole_worker_is_asked_again() -> None:
    sole = WORKERS[:1]
    request = Place(
        request_id=RequestId("r"),
        model=ModelName("m"),
        num_tokens=1,
        max_tokens=1,
        exclude=[sole[0].worker_id],
    )
    assert Placement(SchedulerSettings()).eligible(request, sole) == sole
