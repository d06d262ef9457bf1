"""Engine: what it says when rows, steps and streams fail, and what it remembers for traces."""

from collections.abc import Callable

import pytest

from tokenmesh.engine.core.engine import Engine, EngineBroken
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.core.sim import SimRunner, SimVocabulary
from tokenmesh.engine.plan import StepPlan, StepResult
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.runner import NO_IMAGES, FinishedLaunch, Launch
from tokenmesh.services.worker_svc.telemetry import record_spans, sampled
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.messages.tokens import Delta

MakeRequest = Callable[..., Request]
SETTINGS = WorkerSettings(
    sim_time_scale=0.0, sim_num_blocks=64, max_step_failures=2, trace_step_events=4, block_size=4
)
PARENT = f"00-{1:032x}-{2:016x}-01"


class Failed:
    """A launch that raises."""

    def wait(self, timeout_s: float) -> bool:
        return True

    def result(self) -> StepResult:
        raise RuntimeError("out of memory")


class Troubled:
    """Fails when a test sets it."""

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

    def __init__(self) -> None:
        self._sim = SimRunner(SimVocabulary(100), SETTINGS, lambda _: None)
        self.must_fail = False
        self.failing_streams: set[int] = set()

    def launch(self, plan: StepPlan) -> Launch:
        if self.must_fail:
            return Failed()
        result = self._sim.launch(plan).result()
        result.errors = {
            new.row: "no such media"
            for new in plan.new_rows
            if new.sampling.seed in self.failing_streams
        }
        return FinishedLaunch(result)


def deltas_of(output: StepOutput) -> list[Delta]:
    return [delta for deltas in output.deltas.values() for delta in deltas]


def step(engine: Engine) -> StepOutput:
    """One step from its launch to its tokens."""
    engine.step()
    engine.settle()
    return engine.take_output()


def test_a_failing_step_ends_its_streams_and_the_engine_goes_on(make_request: MakeRequest) -> None:
    runner = Troubled()
    engine = Engine(runner, SETTINGS)
    engine.add(make_request(1, [1, 2, 3]))
    runner.must_fail = True
    (delta,) = deltas_of(step(engine))
    assert delta.finish == "error"
    assert delta.error is not None
    assert (delta.error.code, delta.error.retryable) == ("internal_error", True)
    assert "out of memory" in delta.error.message
    assert not engine.has_work
    runner.must_fail = False
    engine.add(make_request(2, [1, 2, 3]))
    output = step(engine)
    assert deltas_of(output)[0].finish is None
    assert output.stats.kv_blocks_used == 1


def test_failing_again_and_again_breaks_the_engine(make_request: MakeRequest) -> None:
    runner = Troubled()
    runner.must_fail = True
    engine = Engine(runner, SETTINGS)
    engine.add(make_request(1, [1]))
    engine.step()
    engine.settle()
    engine.add(make_request(2, [1]))
    with pytest.raises(EngineBroken, match="2 steps in a row"):
        step(engine)
    assert len(engine.take_output().ended) == 2


def test_a_failing_row_sends_back_who_read_its_blocks(make_request: MakeRequest) -> None:
    runner = Troubled()
    engine = Engine(runner, SETTINGS)
    prompt = list(range(12))
    runner.failing_streams = {1}
    engine.add(make_request(1, prompt))
    engine.add(make_request(2, prompt))
    output = step(engine)
    assert [(delta.stream, delta.finish) for delta in deltas_of(output)] == [(1, "error")]
    assert output.stats.kv_blocks_used == 0
    assert (output.stats.waiting, output.stats.queued_tokens) == (1, 12)
    output = step(engine)
    assert [(delta.stream, delta.finish) for delta in deltas_of(output)] == [(2, None)]
    assert output.stats.kv_blocks_used == 3


def test_cancel_frees_blocks_at_once_and_ends_the_stream_once(make_request: MakeRequest) -> None:
    engine = Engine(Troubled(), SETTINGS)
    request = make_request(1, [1, 2, 3], max_tokens=50)
    engine.add(request)
    step(engine)
    engine.cancel(request.key)
    engine.cancel(request.key)
    output = engine.take_output()
    assert output.stats.kv_blocks_used == 0
    assert [delta.finish for delta in deltas_of(output)] == ["abort"]
    assert not engine.has_work


def test_the_timeline_tells_chunks_first_token_and_thinned_steps(make_request: MakeRequest) -> None:
    engine = Engine(Troubled(), SETTINGS)
    request = make_request(1, [1, 2, 3], max_tokens=30, traceparent=PARENT)
    engine.add(request)
    while engine.has_work:
        engine.step()
    (ended,) = engine.take_output().ended
    timeline = request.timeline
    assert [(chunk.num_tokens, chunk.batch_size) for chunk in timeline.chunks] == [(3, 1)]
    times = (
        timeline.arrived_ns,
        timeline.first_scheduled_ns,
        timeline.first_token_ns,
        timeline.ended_ns,
    )
    assert list(times) == sorted(times)
    assert timeline.chunks[0].start_ns >= timeline.first_scheduled_ns
    assert timeline.chunks[0].end_ns <= timeline.first_token_ns
    assert 2 <= len(ended.steps) <= SETTINGS.trace_step_events
    assert all(entry.batch_size == 1 for entry in ended.steps)
    record_spans(ended)


def test_an_untraced_stream_costs_no_events(make_request: MakeRequest) -> None:
    engine = Engine(Troubled(), SETTINGS)
    engine.add(make_request(1, [1], traceparent=sampled(PARENT[:-1] + "0")))
    while engine.has_work:
        engine.step()
    assert engine.take_output().ended[0].steps == []
    assert sampled(PARENT) == PARENT
    assert sampled(None) is None


def test_rates_are_measured(make_request: MakeRequest) -> None:
    engine = Engine(Troubled(), SETTINGS)
    engine.add(make_request(1, list(range(40)), max_tokens=5))
    stats = step(engine).stats
    assert stats.prefill_tokens_per_s > 0
    assert stats.step_s == 0
    assert step(engine).stats.step_s > 0
