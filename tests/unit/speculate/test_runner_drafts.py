"""RunnerDrafts: how many drafts it asks the runner for."""

from typing import Any

from tests.fakes.drafts import FreeDrafts
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.engine.speculate.adaptive import StepCost
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams


class Runner:
    """Has a drafter."""

    max_proposed = 4


def drafts_of(cost: StepCost) -> RunnerDrafts:
    runner: Any = Runner()
    return RunnerDrafts(runner, 100, 4, cost)


def stream(number: int = 0) -> Request:
    spec = RequestSpec(
        key=StreamKey(GatewayId("g"), number, 0),
        request_id=RequestId(str(number)),
        num_prompt=1,
        sampling=SamplingParams(seed=0, max_tokens=10_000, ignore_eos=True),
    )
    return Request(spec, [1])


def decode(
    drafts: RunnerDrafts, request: Request, num_tokens: int, share_right: float
) -> list[int]:
    """Let the stream draw so many tokens; how many drafts were asked for after each."""
    asked, num_right = [], 0.0
    for _ in range(num_tokens):
        request.token_ids.append(1)
        number = 0
        if drafts.wants(request):
            (number,) = drafts.ask([(request, 9)], 1)
        asked.append(number)
        drafts.note_step(1, number, drafts._cost.factor(1, number))
        if number:
            num_right += share_right * number
            accepted, num_right = int(num_right), num_right % 1
            drafts.note_landed(request, number, min(accepted, number))
    return asked


def test_no_drafts_are_asked_for_before_a_step_without_them_was_measured() -> None:
    drafts, request = drafts_of(cost := StepCost()), stream()
    assert drafts.ask([(request, 9)], 1) == [0]
    for _ in range(2):
        cost.note(1, 0, 1.0)
    (number,) = drafts.ask([(request, 9)], 1)
    assert number > 1
    assert drafts.ask([(request, 1)], 1) == [1]


def test_a_stream_whose_drafts_are_right_keeps_them() -> None:
    assert set(decode(drafts_of(FreeDrafts()), stream(), 200, 1.0)) == {4}


def costly() -> StepCost:
    """One draft takes half as long as a step without."""
    cost = StepCost()
    for _ in range(4):
        cost.note(1, 0, 1.0)
    for number in (1, 2, 4):
        cost.note(1, number, 1.0 + number / 2)
        cost.note(1, 0, 1.0)
    return cost


def test_a_stream_whose_drafts_are_wrong_rests_and_is_tried_again_ever_more_seldom() -> None:
    drafts, request = drafts_of(costly()), stream()
    first = sum(number > 0 for number in decode(drafts, request, 200, 0.0))
    later = sum(number > 0 for number in decode(drafts, request, 2000, 0.0))
    assert 0 < first < 20
    assert 0 < later < 20


def test_a_stream_that_rested_drafts_again_once_drafts_are_right() -> None:
    drafts, request = drafts_of(costly()), stream()
    decode(drafts, request, 100, 0.0)
    asked = decode(drafts, request, 400, 1.0)
    # now and then a step without drafts is measured again
    assert sum(number > 0 for number in asked[-100:]) >= 98


def test_drafts_that_never_pay_take_a_hundredth_of_the_time_whatever_streams_come() -> None:
    drafts, num_tokens = drafts_of(costly()), 100
    decode(drafts, stream(), 1000, 0.0)
    asked = [n for each in range(20) for n in decode(drafts, stream(each), num_tokens, 0.0)]
    wasted_s = sum(drafts._cost.factor(1, number) - 1.0 for number in asked)
    assert 0 < wasted_s < 0.015 * len(asked) + 2.0


def test_a_stream_does_not_wait_for_drafts_where_those_of_others_do_not_pay() -> None:
    drafts = drafts_of(costly())
    decode(drafts, stream(), 1000, 0.0)
    late = stream(1)
    held = 0
    for _ in range(30):
        late.token_ids.append(1)
        if drafts.wants(late):
            held += 1
            drafts.ask([(late, 9)], 1)
    assert held == 1


def test_nothing_is_kept_of_a_stream_that_ended() -> None:
    drafts, request = drafts_of(FreeDrafts()), stream()
    decode(drafts, request, 10, 0.5)
    drafts.forget(request)
    assert drafts.propose([(request, 3)], 1) == [[]]
    assert not drafts._by_request


def test_drafts_of_tokens_that_were_drawn_again_are_not_used() -> None:
    drafts, request = drafts_of(FreeDrafts()), stream()
    drafts.note(request, [5, 6, 7])
    request.token_ids.append(1)
    assert drafts.propose([(request, 3)], 1) == [[]]
    drafts.note(request, [5, 6, 7])
    assert drafts.propose([(request, 2)], 1) == [[5, 6]]
    assert drafts.propose([(request, 2)], 1) == [[]]
