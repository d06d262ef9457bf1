"""A placement excludes some workers."""

import dataclasses

import msgspec
import pytest

from tokenmesh.services.scheduler_svc.placement import LoadPlacement, Worker
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
        # All have failed: only the last one stays excluded.
        ("bac", "ac"),
        ("xabc", "abc"),
    ],
)
def test_the_worker_that_failed_last_is_excluded_the_longest(exclude: str, expected: str) -> None:
    request = Place(
        request_id=RequestId("r"),
        model=ModelName("m"),
        num_tokens=1,
        max_tokens=1,
        exclude=[WorkerId(name) for name in exclude],
    )
    found = LoadPlacement(SchedulerSettings()).eligible(request, WORKERS)
    assert "".join(each.worker_id for each in found) == expected


@pytest.mark.parametrize(
    ("starting", "full", "exclude", "expected"),
    [
        ("", "", "", "abc"),
        ("b", "", "", "ac"),
        ("abc", "", "", "abc"),
        # a worker without room would make it wait as well
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
    placement = LoadPlacement(SchedulerSettings())
    found = placement.eligible(guided, workers)
    assert "".join(each.worker_id for each in found) == expected
    is_excluded = [each.worker_id in exclude for each in placement.eligible(plain, workers)]
    assert is_excluded == [False] * (len(WORKERS) - len(exclude))


def test_a_sole_worker_is_eligible_after_a_failure() -> None:
    sole = WORKERS[:1]
    request = Place(
        request_id=RequestId("r"),
        model=ModelName("m"),
        num_tokens=1,
        max_tokens=1,
        exclude=[sole[0].worker_id],
    )
    assert LoadPlacement(SchedulerSettings()).eligible(request, sole) == sole
