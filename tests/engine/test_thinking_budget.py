"""thinking_token_budget: where it forces the marker, and that a resumed row does the same."""

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.sampler import Sampler
from tokenmesh.engine.sampling.thinking import ThinkingTracker
from tokenmesh.shared.messages.sampling import SamplingParams, ThinkingBudget

VOCAB = 12
START, END = 10, 11
IDS = st.lists(st.integers(0, 3), max_size=12)
MARKERS = st.lists(st.integers(0, 3), min_size=1, max_size=3)


def draw_many(
    budget: ThinkingBudget, prompt: list[int], wanted: list[int], output: list[int] | None = None
) -> list[int]:
    """Return the drawn tokens when the model wants `wanted`, one token at each position."""
    sampler = Sampler(VOCAB, frozenset())
    params = SamplingParams(seed=1, max_tokens=99, temperature=0.0, thinking=budget)
    done = list(output or [])
    sampler.add(NewRow(0, prompt + done, len(prompt), params, [], False))
    for token in wanted[len(done) :]:
        logits = torch.zeros(1, VOCAB)
        logits[0, token] = 5.0
        done.append(sampler.draw([0], logits).draw_by_row[0].token_id)
    return done


def test_reasoning_ends_when_the_budget_is_spent() -> None:
    budget = ThinkingBudget(num_tokens=3, start_ids=[START], end_ids=[END])
    opened = msgspec.structs.replace(budget, is_open=True)
    assert draw_many(opened, [1, START], [1, 2, 3, 4, 5, 6]) == [1, 2, 3, END, 5, 6]
    assert draw_many(opened, [1, START], [1, END, 3, 4, 5, 6, 7]) == [1, END, 3, 4, 5, 6, 7]
    assert draw_many(budget, [1, START], [1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]
    assert draw_many(budget, [1], [9, START, 1, 2, 3, 4, 5]) == [9, START, 1, 2, 3, END, 5]


def test_a_budget_of_nothing_ends_reasoning_at_once() -> None:
    budget = ThinkingBudget(num_tokens=0, start_ids=[START], end_ids=[END])
    opened = msgspec.structs.replace(budget, is_open=True)
    assert draw_many(opened, [START], [5, 5]) == [END, 5]
    assert draw_many(budget, [1], [5, START, 5, 5]) == [5, START, END, 5]


def test_what_the_prompt_has_thought_counts() -> None:
    budget = ThinkingBudget(num_tokens=3, is_open=True, num_spent=1, end_ids=[END])
    assert draw_many(budget, [START, 5], [1, 2, 3, 4]) == [1, 2, END, 4]


def test_a_marker_that_has_begun_by_itself_is_completed() -> None:
    budget = ThinkingBudget(num_tokens=2, is_open=True, end_ids=[7, 8, 9])
    assert draw_many(budget, [START], [1, 7, 1, 1, 1]) == [1, 7, 8, 9, 1]
    assert draw_many(budget, [START], [1, 2, 1, 1, 1, 1]) == [1, 2, 7, 8, 9, 1]


def test_whatever_ends_reasoning_ends_the_counting() -> None:
    budget = ThinkingBudget(
        num_tokens=2, is_open=True, start_ids=[START], end_ids=[END], other_ends=[[7, 8], [9]]
    )
    assert draw_many(budget, [START], [1, 9, 1, 1, 1]) == [1, 9, 1, 1, 1]
    assert draw_many(budget, [START], [1, 7, 8, 1, 1]) == [1, 7, END, 1, 1]
    wide = msgspec.structs.replace(budget, num_tokens=3)
    assert draw_many(wide, [START], [1, 7, 8, 1, 1]) == [1, 7, 8, 1, 1]
    assert draw_many(budget, [START], [1, 9, START, 1, 1, 1]) == [1, 9, START, 1, END, 1]


def test_nothing_else_can_forbid_the_marker() -> None:
    budget = ThinkingBudget(num_tokens=0, is_open=True, end_ids=[END])
    sampler = Sampler(VOCAB, frozenset({END}))
    params = SamplingParams(
        seed=1, max_tokens=9, thinking=budget, allowed_token_ids=[1], bad_words_ids=[[END]]
    )
    sampler.add(NewRow(0, [START], 1, params, [], False))
    assert sampler.draw([0], torch.zeros(1, VOCAB)).draw_by_row[0].token_id == END


@given(IDS, IDS, st.one_of(st.just([]), MARKERS), MARKERS, st.integers(0, 5), st.data())
def test_a_resumed_row_goes_on_as_if_it_had_never_stopped(
    prompt: list[int],
    wanted: list[int],
    start: list[int],
    end: list[int],
    num_tokens: int,
    data: st.DataObject,
) -> None:
    budget = ThinkingBudget(
        num_tokens=num_tokens,
        is_open=data.draw(st.booleans()),
        num_spent=data.draw(st.integers(0, 3)),
        start_ids=start,
        end_ids=end,
        other_ends=data.draw(st.lists(MARKERS, max_size=2)),
    )
    whole = draw_many(budget, [5, *prompt], wanted)
    cut = data.draw(st.integers(0, len(whole)))
    assert draw_many(budget, [5, *prompt], wanted, whole[:cut]) == whole


@given(IDS, st.lists(st.integers(0, 3), max_size=40), MARKERS, st.integers(0, 3), st.data())
def test_no_more_is_thought_than_the_budget_allows(
    prompt: list[int], wanted: list[int], start: list[int], end: int, data: st.DataObject
) -> None:
    budget = ThinkingBudget(
        num_tokens=data.draw(st.integers(0, 5)),
        is_open=data.draw(st.booleans()),
        start_ids=start,
        end_ids=[end],
    )
    output = draw_many(budget, [5, *prompt], wanted)
    tracker = ThinkingTracker(budget, [5, *prompt], len(prompt) + 1)
    for token in output:
        tracker.push(token)
        assert tracker.count <= budget.num_tokens
