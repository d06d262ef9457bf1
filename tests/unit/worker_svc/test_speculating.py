"""Speculating: what it leaves behind for others, besides the tokens of its streams."""

from random import Random
from typing import Any

from tests.fakes.drafts import DiceProposer
from tests.fakes.kv_runner import VOCAB, KvRunner
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.speculating import DraftTotals
from tokenmesh.engine.plan import StepResult
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams

SETTINGS = WorkerSettings(
    max_num_seqs=4, max_num_batched_tokens=40, block_size=2, async_scheduling=False
)


def request(stream: int, prompt: list[int], max_tokens: int, **sampling: Any) -> Request:
    return Request(
        RequestSpec(
            key=StreamKey(GatewayId("g"), stream, 0),
            request_id=RequestId(f"r{stream}"),
            num_prompt=len(prompt),
            sampling=SamplingParams(
                seed=stream, max_tokens=max_tokens, ignore_eos=True, **sampling
            ),
        ),
        list(prompt),
    )


def engine_with(proposer: DiceProposer | None, num_blocks: int = 60) -> Engine:
    runner = KvRunner(SETTINGS, num_blocks, Random(0), 0.0, 0.0)
    return Engine(runner, SETTINGS, proposer=proposer)


def proposer_of(output: list[int], max_rows: int, share_wrong: float = 0.5) -> DiceProposer:
    return DiceProposer(
        Random(1),
        lambda request: output if request.key.stream == 0 else [],
        VOCAB,
        max_drafts=9,
        max_rows=max_rows,
        share_wrong=share_wrong,
    )


def test_every_block_can_be_found_though_drafts_were_given_up_half_way() -> None:
    engine, plain = engine_with(None), request(0, [3, 4, 5], 30)
    engine.add(plain)
    while engine.has_work:
        engine.step()
    output = plain.token_ids[3:]
    for num_alone in range(1, 8):
        engine, first = engine_with(proposer_of(output, max_rows=1)), request(0, [3, 4, 5], 30)
        engine.add(first)
        for _ in range(num_alone):
            engine.step()
        # with two of them, both decode without drafts
        engine.add(request(1, [7] * 5, 30))
        while engine.has_work:
            engine.step()
        assert first.token_ids == plain.token_ids
        found = engine._cache.find(request(2, plain.token_ids, 1))[0]
        assert len(found) == (len(plain.token_ids) - 1) // 2


def right_drafts(settings: WorkerSettings = SETTINGS) -> tuple[Engine, Request, KvRunner]:
    """An engine whose first stream has drafts that are all right, once its prompt is computed."""
    plain, engine = request(0, [3, 4, 5], 30), engine_with(None)
    engine.add(plain)
    while engine.has_work:
        engine.step()
    runner = KvRunner(settings, 60, Random(0), 0.0, 0.0)
    engine = Engine(runner, settings, proposer=proposer_of(plain.token_ids[3:], 9, 0.0))
    drafted = request(0, [3, 4, 5], 30)
    engine.add(drafted)
    while drafted.num_known < 6:
        engine.step()
    return engine, drafted, runner


def totals_of(engine: Engine) -> DraftTotals:
    return engine.take_output().stats.drafts


ASYNC = SETTINGS.model_copy(update={"async_scheduling": True})


def in_flight_with_drafts() -> tuple[Engine, Request, DraftTotals]:
    """A step with drafts is in flight; the counts of those before it."""
    engine, drafted, _ = right_drafts(ASYNC)
    while not (engine._in_flight and engine._in_flight[-1].plan.has_drafts):
        engine.step()
    return engine, drafted, totals_of(engine)


def test_drafts_of_a_stream_that_was_aborted_in_a_step_are_not_counted() -> None:
    engine, drafted, before = in_flight_with_drafts()
    engine.cancel(drafted.key)
    engine.settle()
    assert totals_of(engine) == before


def test_drafts_of_a_stream_that_was_preempted_in_a_step_are_not_counted() -> None:
    engine, drafted, before = in_flight_with_drafts()
    engine._scheduler.preempt(drafted)
    engine.settle()
    assert totals_of(engine) == before
    while engine.has_work:
        engine.step()
    assert totals_of(engine).drafts > before.drafts


def test_drafts_of_a_row_that_failed_are_not_counted() -> None:
    engine, _, runner = right_drafts()
    before = totals_of(engine)
    runner._row_trouble = 1.0
    engine.step()
    assert (totals_of(engine), engine.has_work) == (before, False)


class FailedLaunch:
    """Implements `Launch`."""

    def wait(self, timeout_s: float) -> bool:
        return True

    def result(self) -> StepResult:
        raise RuntimeError("the device is gone")


def test_drafts_of_a_step_that_failed_are_not_counted() -> None:
    engine, _, runner = right_drafts()
    before = totals_of(engine)
    runner.launch = lambda plan: FailedLaunch()  # type: ignore[method-assign, assignment, return-value]
    engine.step()
    assert (totals_of(engine), engine.has_work) == (before, False)


def test_a_stream_that_stops_among_its_drafts_counts_those_that_it_got() -> None:
    plain, engine = request(0, [3, 4, 5], 30), engine_with(None)
    engine.add(plain)
    while engine.has_work:
        engine.step()
    output = plain.token_ids[3:]
    place = next(n for n in range(3, 30) if output[n] not in output[:n])
    stopping = request(0, [3, 4, 5], 30, stop_token_ids=[output[place]])
    engine = engine_with(proposer_of(output, 9, 0.0))
    engine.add(stopping)
    while engine.has_work:
        engine.step()
    totals = totals_of(engine)
    assert stopping.token_ids[3:] == output[: place + 1]
    assert 0 < totals.accepted_tokens <= place
    assert stopping.output.num_accepted == totals.accepted_tokens


def test_a_stream_that_moved_here_counts_what_it_drafts_here() -> None:
    _, drafted, _ = right_drafts()
    engine = engine_with(None)
    moved = Request(drafted.spec, list(drafted.token_ids))
    assert moved.output.num_drafts == 0
    engine.add(moved)
    while engine.has_work:
        engine.step()
    assert totals_of(engine) == DraftTotals()
