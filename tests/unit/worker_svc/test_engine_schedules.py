"""Random schedules, with a step in flight and without: the tokens are the same."""

import logging
from collections import Counter

import pytest

from tests.fakes.engine_schedules import Schedule
from tests.rounds import rounds
from tokenmesh.engine.core import engine as engine_module

SCHEDULES_PER_TEST = 100
EVENTS = ("stop", "length", "preempted", "cached")


def run_all(first: int, count: int, *, trouble: float, is_async: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        counts += Schedule(seed, trouble, is_async).run()
    return counts


@rounds("chunk", 1, 100)
def test_every_request_ends_once_with_the_tokens_of_an_unbatched_run(chunk: int) -> None:
    first = chunk * SCHEDULES_PER_TEST
    counts = run_all(first, SCHEDULES_PER_TEST, trouble=0.0, is_async=True)
    # the schedules are worth something only if all of this happened
    assert min(counts[kind] for kind in (*EVENTS, "abort", "overlapped")) > 3


@rounds("chunk", 1, 20)
def test_without_steps_in_flight_the_tokens_are_the_same(chunk: int) -> None:
    first = chunk * SCHEDULES_PER_TEST
    counts = run_all(first, SCHEDULES_PER_TEST, trouble=0.0, is_async=False)
    assert min(counts[kind] for kind in (*EVENTS, "abort")) > 3
    assert counts["overlapped"] == 0


@rounds("chunk", 2, 50)
def test_failing_rows_and_steps_never_change_the_tokens_of_others(
    chunk: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    first, is_async = 1_000_000 + chunk * SCHEDULES_PER_TEST, chunk % 5 > 0
    counts = run_all(first, SCHEDULES_PER_TEST, trouble=0.15, is_async=is_async)
    assert min(counts[kind] for kind in (*EVENTS, "error")) > 3
    assert (counts["wasted"] > 3) == is_async


@pytest.mark.parametrize("trouble", [0.0, 0.15])
@rounds("chunk", 2, 9)
def test_requests_that_outgrow_their_rope_boundary_are_computed_again(
    chunk: int, trouble: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    counts: Counter[str] = Counter()
    for seed in range(5_000_000 + 100 * chunk, 5_000_100 + 100 * chunk):
        is_async, has_tenants = chunk % 3 > 0, chunk % 3 > 1
        schedule = Schedule(
            seed, trouble, is_async=is_async, has_tenants=has_tenants, has_boundary=True
        )
        counts += schedule.run()
    assert min(counts[kind] for kind in ("crossed", "preempted", "cached")) > 3


@pytest.mark.parametrize("trouble", [0.0, 0.15])
@rounds("chunk", 2, 12)
def test_who_gives_way_to_another_tenant_goes_on_with_the_same_tokens(
    chunk: int, trouble: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    counts: Counter[str] = Counter()
    for seed in range(3_000_000 + 100 * chunk, 3_000_100 + 100 * chunk):
        counts += Schedule(seed, trouble, is_async=chunk % 6 > 0, has_tenants=True).run()
    assert counts["preempted"] > 7


@rounds("chunk", 1, 10)
def test_overlap_changes_nothing_that_a_stream_says(chunk: int) -> None:
    for at in range(50 * chunk, 50 * chunk + 50):
        said = []
        for is_async in (False, True):
            schedule = Schedule(at, 0.0, is_async, may_cancel=False)
            schedule.run()
            said.append(
                [
                    (case.received, case.finishes[0].finish, case.prompt_logprobs)
                    for case in schedule.cases
                ]
            )
        assert said[0] == said[1]


@pytest.mark.parametrize("trouble", [0.0, 0.15])
@pytest.mark.parametrize(("kind", "first"), [("has_windows", 7_000_000), ("has_states", 9_000_000)])
@rounds("chunk", 1, 100)
def test_window_groups_and_saved_states_change_no_token(
    chunk: int, kind: str, first: int, trouble: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    counts: Counter[str] = Counter()
    first += SCHEDULES_PER_TEST * chunk
    for seed in range(first, first + SCHEDULES_PER_TEST):
        schedule = Schedule(
            seed,
            trouble,
            is_async=seed % 3 > 0,
            has_tenants=seed % 2 > 0,
            has_drafts=seed % 5 > 2,
            **{kind: True},
        )
        counts += schedule.run()
    assert min(counts[each] for each in EVENTS) > 3


@pytest.mark.parametrize("trouble", [0.0, 0.15])
@rounds("chunk", 1, 100)
def test_blocks_from_the_host_tier_change_no_token(
    chunk: int, trouble: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    counts: Counter[str] = Counter()
    first = 11_000_000 + SCHEDULES_PER_TEST * chunk
    for seed in range(first, first + SCHEDULES_PER_TEST):
        schedule = Schedule(
            seed,
            trouble,
            is_async=seed % 3 > 0,
            has_tenants=seed % 2 > 0,
            has_boundary=seed % 4 == 1,
            has_drafts=seed % 5 == 2,
            has_windows=seed % 7 == 3,
            has_host=True,
        )
        counts += schedule.run()
    assert counts["filled"] > 50
    assert min(counts[kind] for kind in EVENTS) > 3


def test_a_prompt_goes_on_while_a_request_of_another_tenant_gives_way_again_and_again() -> None:
    # the other one has had less, and begins anew in every second step
    schedule = Schedule(
        11_001_673, 0.0, is_async=True, has_tenants=True, has_boundary=True, has_host=True
    )
    schedule.run()


def test_what_a_row_made_of_lost_blocks_is_forgotten_when_its_request_has_left() -> None:
    # the row that shares blocks with one that fails has given way before that is known
    schedule = Schedule(7_007_417, 0.15, is_async=True, has_tenants=True, has_windows=True)
    counts = schedule.run()
    assert counts["error"] == 5


@pytest.mark.parametrize("trouble", [0.0, 0.15])
@rounds("chunk", 1, 50)
def test_drafts_change_no_token(
    chunk: int, trouble: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    counts: Counter[str] = Counter()
    first = 9_000_000 + SCHEDULES_PER_TEST * chunk
    for seed in range(first, first + SCHEDULES_PER_TEST):
        schedule = Schedule(
            seed,
            trouble,
            is_async=seed % 3 > 0,
            has_tenants=seed % 4 > 2,
            has_boundary=seed % 5 == 0,
            has_windows=seed % 2 > 0,
            has_drafts=True,
        )
        counts += schedule.run()
    kinds = (*EVENTS, "drafts", "right drafts", "crossed")
    assert min(counts[kind] for kind in kinds) > 0
    assert counts["right drafts"] > 100


@pytest.mark.parametrize("trouble", [0.0, 0.15])
@rounds("chunk", 1, 25)
def test_drafts_of_the_runner_change_no_token_and_none_is_kept(
    chunk: int, trouble: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    counts: Counter[str] = Counter()
    first = 11_000_000 + SCHEDULES_PER_TEST * chunk
    for seed in range(first, first + SCHEDULES_PER_TEST):
        schedule = Schedule(
            seed,
            trouble,
            is_async=seed % 3 > 0,
            has_tenants=seed % 4 > 2,
            has_boundary=seed % 5 == 0,
            has_windows=seed % 2 > 0,
            max_proposed=1 + seed % 7,
        )
        counts += schedule.run()
    assert min(counts[kind] for kind in EVENTS) > 0
    assert counts["right drafts"] > 100


@pytest.mark.parametrize("trouble", [0.0, 0.15])
@rounds("chunk", 1, 100)
def test_lanes_of_a_pipeline_change_no_token(
    chunk: int, trouble: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    counts: Counter[str] = Counter()
    first = 13_000_000 + SCHEDULES_PER_TEST * chunk
    for seed in range(first, first + SCHEDULES_PER_TEST):
        schedule = Schedule(
            seed,
            trouble,
            is_async=seed % 2 > 0,
            has_tenants=seed % 3 > 1,
            has_boundary=seed % 5 == 0,
            has_windows=seed % 7 == 3,
            has_drafts=seed % 4 == 2,
            has_host=seed % 11 == 5,
            num_lanes=2 + seed % 3,
        )
        counts += schedule.run()
        assert schedule.runner.max_in_flight <= 2 + seed % 3
    assert min(counts[kind] for kind in (*EVENTS, "abort", "overlapped", "right drafts")) > 3
