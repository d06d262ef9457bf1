"""Whom a placement leaves out, and for how long it can afford that."""

import dataclasses

import msgspec
import pytest

from tokenmesh.services.scheduler_svc.placement import Placement, Worker
from tokenmesh.shared.config.placement import SchedulerSettings
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


@pytest.mark.parametrize(
    ("starting", "full", "exclude", "expected"),
    [
        ("", "", "", "abc"),
        ("b", "", "", "ac"),
        ("abc", "", "", "abc"),
        # who has no room would make it wait as well
        ("ab", "c", "", "abc"),
        # a failure counts for more than a wait
        ("ab", "", "c", "ab"),
    ],
)
def test_a_grammar_goes_where_its_libraries_are_loaded(
    starting: str, full: str, exclude: str, expected: str
) -> None:
    workers = [
        dataclasses.replace(
            each,
            load=WorkerLoad(
                max_num_seqs=9,
                running=9 if each.worker_id in full else 0,
                waiting=99 if each.worker_id in full else 0,
                is_compiler_starting=each.worker_id in starting,
            ),
        )
        for each in WORKERS
    ]
    plain = Place(
        request_id=RequestId("r"),
        model=ModelName("m"),
        num_tokens=1,
        max_tokens=1,
        exclude=[WorkerId(name) for name in exclude],
    )
    guided = msgspec.structs.replace(plain, has_grammar=True)
    placement = Placement(SchedulerSettings())
    found = placement.eligible(guided, workers)
    assert "".join(each.worker_id for each in found) == expected
    is_left_out = [each.worker_id in exclude for each in placement.eligible(plain, workers)]
    assert is_left_out == [False] * (len(WORKERS) - len(exclude))


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
