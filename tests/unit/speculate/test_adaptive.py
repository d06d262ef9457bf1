"""Adaptive numbers of drafts: none where they cost more than they save."""

import pytest

from tokenmesh.engine.speculate.adaptive import Acceptance, StepCost, choose, survivals


def measured(num_rows: int, factors: dict[int, float]) -> StepCost:
    """Costs of steps, by number of drafts, relative to 10 ms."""
    cost = StepCost()
    for _ in range(4):
        cost.note(num_rows, 0, 0.01)
    for number, factor in factors.items():
        cost.note(num_rows, number, 0.01 * factor)
    return cost


def test_there_are_no_drafts_before_a_step_without_them_was_measured() -> None:
    cost = StepCost()
    assert choose(cost, 1, [[0.9, 0.9]]) == [0]
    cost.note(1, 0, 0.01)
    cost.note(1, 0, 0.01)
    assert choose(cost, 1, [[0.9, 0.9]]) == [2]
    assert choose(cost, 9, [[0.9, 0.9]] * 9) == [0] * 9


def test_a_step_has_the_number_of_drafts_that_gives_the_most_tokens_a_second() -> None:
    flat = measured(1, {4: 1.05, 8: 1.1, 16: 3.0})
    assert choose(flat, 1, [[0.9**n for n in range(1, 17)]]) == [8]
    assert choose(flat, 1, [[0.3**n for n in range(1, 17)]]) == [3]
    steep = measured(1, {1: 1.9, 4: 4.6})
    assert choose(steep, 1, [[0.8, 0.7, 0.6]]) == [0]


def test_drafts_go_to_the_rows_where_they_are_most_likely_right() -> None:
    cost = measured(4, {4: 1.4, 8: 1.8, 12: 2.2})
    good, bad = [0.95, 0.93, 0.9, 0.88], [0.1, 0.01]
    assert choose(cost, 4, [bad, good, bad, good]) == [0, 4, 0, 4]
    assert choose(cost, 4, [bad, bad, bad, bad]) == [0, 0, 0, 0]


def test_a_cost_that_has_grown_since_is_measured_again() -> None:
    cost = measured(1, {2: 1.1})
    for _ in range(127):
        cost.note(1, 2, 0.02)  # contexts have grown, and no step was without drafts
        if choose(cost, 1, [[0.9, 0.9]]) == [0]:
            break
    else:
        cost.note(1, 2, 0.02)
    assert choose(cost, 1, [[0.9, 0.9]]) == [0]
    for _ in range(20):
        cost.note(1, 0, 0.02)
    for _ in range(20):
        cost.note(1, 2, 0.022)
    assert choose(cost, 1, [[0.9, 0.9]]) == [2]


def test_one_disturbed_step_does_not_end_drafts_that_pay() -> None:
    cost = measured(1, dict.fromkeys((1, 2, 3), 1.1))
    cost.note(1, 2, 5.0)
    for _ in range(3):
        cost.note(1, 2, 0.011)
    assert choose(cost, 1, [[0.95, 0.95]])[0] > 0


def test_acceptance_is_learned_by_row_and_place_and_new_rows_begin_with_that_of_all() -> None:
    acceptance = Acceptance()
    row = acceptance.of_row()
    for _ in range(200):
        acceptance.note(row, 2, 2, ended_wrong=True)
    kept = survivals(row, 2, 5)
    assert kept[0] > 0.95
    assert kept[1] > 0.9
    assert kept[2] < 0.1
    other = acceptance.of_row()
    assert survivals(other, 2, 3) == pytest.approx(kept[:3], abs=0.1)
    for _ in range(20):
        acceptance.note(other, 2, 0, ended_wrong=True)
    assert survivals(other, 2, 1)[0] < 0.25
    assert survivals(row, 2, 1)[0] > 0.9


def test_the_length_of_a_match_has_rates_of_its_own() -> None:
    acceptance = Acceptance()
    row = acceptance.of_row()
    for _ in range(50):
        acceptance.note(row, 0, 0, ended_wrong=True)
        acceptance.note(row, 4, 8, ended_wrong=False)
    assert survivals(row, 0, 1)[0] < 0.1
    assert survivals(row, 4, 8)[7] > 0.7


def test_a_step_with_drafts_that_was_disturbed_is_tried_again_soon() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.note(8, 0, 0.010)
    cost.note(8, 1, 0.021)
    kept = [[0.9, 0.8]] * 8
    assert sum(choose(cost, 8, kept)) == 0
    for _ in range(200):
        cost.note(8, 0, 0.010)
    assert sum(choose(cost, 8, kept)) > 8
    for _ in range(16):
        cost.note(8, 1, 0.021)
    for _ in range(200):
        cost.note(8, 0, 0.010)
    assert sum(choose(cost, 8, kept)) == 0
