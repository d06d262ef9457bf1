"""Engine with a step in flight: who waits for what, and what becomes of a step too many."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.simulation.virtual_time import VirtualClock, virtual_time
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.core.sim import SimRunner, SimVocabulary
from tokenmesh.engine.plan import StepPlan, StepResult
from tokenmesh.engine.request.request import Request, Status
from tokenmesh.engine.runner import NO_IMAGES, Launch
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.messages.tokens import Delta

MakeRequest = Callable[..., Request]
STEP_S = 1.0
SETTINGS = WorkerSettings(
    sim_step_s=STEP_S,
    sim_seq_s=0.0,
    sim_prefill_tokens_per_s=1e9,
    sim_num_blocks=256,
    block_size=4,
    max_num_seqs=4,
    launch_ahead_s=0.1,
)
STOP = 7
ASK_TO_STOP = {"allowed_token_ids": [STOP], "stop_token_ids": [STOP]}


class Laboratory:
    """Remembers its plans; a launch raises or has failing rows when a test sets it so."""

    num_blocks = SETTINGS.sim_num_blocks
    windows: tuple[int | None, ...] = (None,)
    has_states = False
    has_pages = True
    num_saved_states = 0
    takes_drafts = True
    max_proposed = 0
    images = NO_IMAGES
    has_own_device = True
    num_lanes = 1

    def __init__(self, clock: VirtualClock) -> None:
        self._sim = SimRunner(SimVocabulary(100), SETTINGS, clock.sleep)
        self.plans: list[StepPlan] = []
        self.raising: set[int] = set()
        """Numbers of launches."""
        self.failing: dict[int, int] = {}
        """Launch -> row."""

    def launch(self, plan: StepPlan) -> Launch:
        number = len(self.plans)
        self.plans.append(plan)
        launch = self._sim.launch(plan)
        error = RuntimeError("out of memory") if number in self.raising else None
        return Fated(launch, error, self.failing.get(number))


class Fated:
    """A launch with its fate."""

    def __init__(self, launch: Launch, error: Exception | None, failing: int | None) -> None:
        self.wait = launch.wait
        self._launch = launch
        self._error = error
        self._failing = failing

    def result(self) -> StepResult:
        result = self._launch.result()
        if self._error is not None:
            raise self._error
        if self._failing is not None:
            result.errors[self._failing] = "not finite"
            result.tokens.pop(self._failing, None)
        return result


class Bench:
    """An engine in virtual time."""

    def __init__(self, clock: VirtualClock, settings: WorkerSettings = SETTINGS) -> None:
        self.clock = clock
        self.runner = Laboratory(clock)
        self.engine = Engine(self.runner, settings)

    def step(self) -> StepOutput:
        self.engine.step()
        return self.engine.take_output()

    def finish(self) -> list[Delta]:
        """Run to the end; everything that was said."""
        said: list[Delta] = []
        while self.engine.has_work:
            said += deltas_of(self.step())
        return said


def deltas_of(output: StepOutput) -> list[Delta]:
    return [delta for deltas in output.deltas.values() for delta in deltas]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with virtual_time() as clock:
        yield Bench(clock)


def test_a_token_is_handed_out_when_its_step_ends(bench: Bench, make_request: MakeRequest) -> None:
    bench.engine.add(make_request(1, [1, 2, 3], max_tokens=10))
    assert not deltas_of(bench.step())
    assert bench.clock.elapsed_s == 0
    for number in range(1, 5):
        assert len(deltas_of(bench.step())) == 1
        assert bench.clock.elapsed_s == pytest.approx(number * STEP_S)
        assert len(bench.runner.plans) == number + 1


def test_no_step_is_launched_past_max_tokens(bench: Bench, make_request: MakeRequest) -> None:
    bench.engine.add(make_request(1, [1, 2, 3], max_tokens=5))
    assert len(bench.finish()) == 5
    assert len(bench.runner.plans) == 5
    assert bench.clock.elapsed_s == pytest.approx(5 * STEP_S)


def test_a_stop_token_wastes_one_step_and_frees_everything_once(
    bench: Bench, make_request: MakeRequest
) -> None:
    bench.engine.add(make_request(1, [1, 2, 3], max_tokens=5, sampling=ASK_TO_STOP))
    bench.step()
    output = bench.step()
    assert [delta.stop_token for delta in deltas_of(output)] == [STOP]
    assert output.stats.kv_blocks_used == 0
    assert bench.engine.has_work
    output = bench.step()
    assert not deltas_of(output)
    assert output.stats.kv_blocks_used == 0
    assert (len(bench.runner.plans), bench.engine.has_work) == (2, False)


def test_a_row_given_away_gets_no_token_of_its_last_owner(
    bench: Bench, make_request: MakeRequest
) -> None:
    first = make_request(1, [1, 2, 3], max_tokens=50)
    bench.engine.add(first)
    bench.step()
    row = first.place.row
    bench.engine.cancel(first.key)
    second = make_request(2, [1], max_tokens=3)
    bench.engine.add(second)
    deltas = deltas_of(bench.step())
    assert second.place.row == row
    assert [(delta.stream, delta.finish) for delta in deltas] == [(1, "abort")]
    deltas = bench.finish()
    assert [(delta.stream, delta.offset) for delta in deltas] == [(2, 0), (2, 1), (2, 2)]


def test_a_cancelled_prefill_tells_no_half_of_its_prompt_logprobs(
    bench: Bench, make_request: MakeRequest
) -> None:
    request = make_request(1, list(range(9)), sampling={"prompt_logprobs": 1})
    bench.engine.add(request)
    bench.step()
    bench.engine.cancel(request.key)
    (delta,) = bench.finish()
    assert (delta.finish, delta.prompt_logprobs) == ("abort", None)
    assert request.timeline.first_scheduled_ns
    assert not request.timeline.chunks


def test_a_block_can_be_found_once_its_last_token_is_known(
    bench: Bench, make_request: MakeRequest
) -> None:
    first = make_request(1, [1, 2, 3], max_tokens=50)
    bench.engine.add(first)
    bench.step()
    bench.step()
    assert first.num_computed == first.num_known == 4
    assert bench.engine._pool.num_cached == 1
    second = make_request(2, [*first.token_ids, 5])
    bench.engine.add(second)
    bench.step()
    assert second.place.num_cached == 4


def test_a_failing_step_takes_the_one_on_top_with_it(
    bench: Bench, make_request: MakeRequest
) -> None:
    first, second = make_request(1, list(range(8))), make_request(2, [*range(8), 9])
    bench.runner.raising = {0, 1}
    bench.engine.add(first)
    bench.step()
    bench.engine.add(second)
    output = bench.step()
    (delta,) = deltas_of(output)
    assert (delta.stream, delta.finish) == (1, "error")
    assert (second.place.status, second.place.num_preemptions) == (Status.WAITING, 1)
    assert output.stats.kv_blocks_used == 0
    assert bench.engine._pool.num_cached == 0
    assert [(delta.stream, delta.offset) for delta in bench.finish()] == [
        (2, offset) for offset in range(4)
    ]


def test_one_failing_step_with_another_on_top_counts_once(
    bench: Bench, make_request: MakeRequest
) -> None:
    settings = SETTINGS.model_copy(update={"max_step_failures": 2})
    bench.engine = Engine(bench.runner, settings)
    bench.runner.raising = {0, 1}
    bench.engine.add(make_request(1, [1]))
    bench.step()
    bench.engine.add(make_request(2, [2]))
    bench.step()
    assert [delta.stream for delta in bench.finish()] == [2, 2, 2, 2]


@pytest.mark.parametrize("failing_launch", [0, 1])
def test_a_failing_row_sends_back_who_hit_its_blocks_in_the_step_on_top(
    bench: Bench, make_request: MakeRequest, failing_launch: int
) -> None:
    first = make_request(1, list(range(7)), max_tokens=50)
    bench.engine.add(first)
    bench.runner.failing = {failing_launch: 0}
    bench.step()
    if failing_launch:
        # its eighth token is drawn and computed: the second block can be found
        bench.step()
    second = make_request(2, [*first.token_ids, 9, 9])
    third = make_request(3, [50, 51])
    bench.engine.add(second)
    bench.engine.add(third)
    said = deltas_of(bench.step())
    assert second.place.num_cached == 4 * (1 + failing_launch)
    assert (1, "error") in [(delta.stream, delta.finish) for delta in said]
    assert [second.place.num_preemptions, third.place.num_preemptions] == [failing_launch or 1, 0]
    assert bench.engine._pool.num_cached == (0 if failing_launch == 0 else 1)
    said = bench.finish()
    assert [delta.offset for delta in said if delta.stream == 2] == list(range(4))
    assert [delta.offset for delta in said if delta.stream == 3] == list(range(4))


def test_a_failing_row_is_not_blamed_on_its_next_owner(
    bench: Bench, make_request: MakeRequest
) -> None:
    first = make_request(1, list(range(9)), max_tokens=50)
    bench.runner.failing = {0: 0}
    bench.engine.add(first)
    bench.step()
    bench.engine.cancel(first.key)
    reader, stranger = make_request(2, list(range(6))), make_request(3, [50, 51])
    bench.engine.add(stranger)
    bench.engine.add(reader)
    bench.step()
    assert [stranger.place.row, stranger.place.num_preemptions, reader.place.num_preemptions] == [
        0,
        0,
        1,
    ]
    assert bench.engine._pool.num_cached == 0
    assert len(bench.finish()) == 8


def first_tokens_s(settings: WorkerSettings, requests: list[Request]) -> list[float]:
    """Seconds from arrival to first token, for a request every 7.3 steps alongside a long one."""
    with virtual_time() as clock:
        bench = Bench(clock, settings)
        bench.engine.add(requests[0])
        arrivals = {request.key.stream: at * 7.3 for at, request in enumerate(requests)}
        waiting = requests[1:]
        waited: list[float] = []
        while waiting or len(waited) < len(requests):
            while waiting and arrivals[waiting[0].key.stream] <= clock.elapsed_s:
                bench.engine.add(waiting.pop(0))
            said = deltas_of(bench.step())
            began = [delta.stream for delta in said if delta.cached_tokens is not None]
            waited += [clock.elapsed_s - arrivals[stream] for stream in began]
            bench.engine.wait_for_launch_window()
    return waited[1:]


def test_a_request_that_arrives_during_a_step_is_in_the_next_one(
    make_request: MakeRequest,
) -> None:
    mean_s = {}
    ways: dict[str, dict[str, Any]] = {
        "sync": {"async_scheduling": False},
        "in time": {},
        "at once": {"launch_ahead_s": 1000.0},
    }
    for way, changes in ways.items():
        requests = [make_request(0, [1], max_tokens=400)]
        requests += [make_request(stream, [stream, 1], max_tokens=3) for stream in range(1, 41)]
        waited = first_tokens_s(SETTINGS.model_copy(update=changes), requests)
        mean_s[way] = sum(waited) / len(waited)
    # half a step until the running one has ended, and the own one
    assert mean_s["sync"] == pytest.approx(1.5 * STEP_S, abs=0.05)
    # a tenth of the arrivals comes after the launch
    assert mean_s["in time"] == pytest.approx(mean_s["sync"] + 0.1 * STEP_S, abs=0.05)
    assert mean_s["at once"] == pytest.approx(mean_s["sync"] + STEP_S, abs=0.05)


def test_settle_hands_out_what_is_in_flight(bench: Bench, make_request: MakeRequest) -> None:
    bench.engine.add(make_request(1, [1]))
    bench.step()
    bench.engine.settle()
    assert len(deltas_of(bench.engine.take_output())) == 1
    bench.engine.settle()
    assert len(bench.runner.plans) == 1
