"""Experts are placed as the published algorithm places them, and get there one by one."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.engine.exec.balancer import Balancer
from tokenmesh.engine.ranks.placement import imbalance, kept_in_place, moves, placed
from tokenmesh.shared.config.eplb import EplbConfig

LOADS = (
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
)
"""Two layers of twelve experts, and where the authors of the algorithm say that they belong."""
PLACES = (
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
)
MOST = 1.15


def test_the_published_example_comes_out_as_published() -> None:
    assert placed(LOADS, slots=16, groups=4, nodes=2, ranks=8).tolist() == [*map(list, PLACES)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int, int]:
    """Loads, slots, groups, nodes and ranks that divide each other."""
    nodes, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups, ranks = nodes * draw(st.integers(1, 3)), nodes * each
    experts = groups * each * draw(st.integers(1, 3))
    slots = -(-(experts + draw(st.integers(0, 12))) // ranks) * ranks
    loads = draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts))
    return np.array([loads]), slots, groups, nodes, ranks


@given(cases())
def test_each_expert_has_a_slot_and_its_group_a_node(
    case: tuple[np.ndarray, int, int, int, int],
) -> None:
    loads, slots, groups, nodes, ranks = case
    found, count = placed(loads, slots, groups, nodes, ranks)[0].tolist(), loads.shape[1]
    assert len(found) == slots
    assert set(found) == set(range(count))
    homes: dict[int, int] = {}
    for slot, expert in enumerate(found):
        node = slot // (slots // nodes)
        assert homes.setdefault(expert // (count // groups), node) == node
    shares = sorted(loads[0][each] / copies for each, copies in Counter(found).items())
    assert shares, "copies go where most is to be done"


@given(cases(), st.randoms())
def test_experts_are_somewhere_between_any_two_moves(
    case: tuple[np.ndarray, int, int, int, int], random: st.DrawFn
) -> None:
    loads, slots, groups, nodes, ranks = case
    before = placed(np.roll(loads, 3), slots, groups, nodes, ranks)[0].tolist()
    random.shuffle(before)  # type: ignore[attr-defined]
    wanted = placed(loads, slots, groups, nodes, ranks)[0].tolist()
    after, now = kept_in_place(before, wanted, ranks), list(before)
    each = slots // ranks
    for first in range(0, slots, each):
        own = slice(first, first + each)
        assert sorted(after[own]) == sorted(wanted[own])
        stays = sum((Counter(before[own]) & Counter(after[own])).values())
        assert sum(a == b for a, b in zip(before[own], after[own], strict=True)) == stays
    for move in moves(before, after):
        if move.swaps:
            now[move.source], now[move.target] = now[move.target], now[move.source]
        else:
            now[move.target] = now[move.source]
        assert set(now) == set(before)
    assert now == after


def test_a_skew_of_64_experts_is_balanced_over_four_ranks() -> None:
    loads = 1 / np.arange(1, 65) ** 1.2
    np.random.default_rng(0).shuffle(loads)
    assert imbalance(loads, range(64), 4) > 1.4
    for spare in (4, 8, 16):
        slots = placed(loads[None], 64 + spare, 1, 1, 4)[0].tolist()
        assert imbalance(loads, slots, 4) <= MOST


@pytest.mark.parametrize(("interval", "window"), [(1, 1), (2, 5), (4, 4), (9, 3)])
def test_every_layer_gets_its_turn_by_the_tokens_of_the_whole_window(
    interval: int, window: int
) -> None:
    # the experts of the first rank have all tokens
    layers: list[Any] = [
        SimpleNamespace(experts=[0, 1, 2, 3], counts=torch.zeros(4, dtype=torch.int64), num_bytes=8)
        for _ in range(6)
    ]
    config = EplbConfig(step_interval=interval, window_size=window)
    balancer = Balancer(config, 2, 1, 1, lambda: layers)
    moved = set()
    for _ in range(12 * interval + 12):
        part = balancer.next_part()
        moved |= set() if part is None else {part.layer}
        assert len(balancer._due) <= len(layers)
        for each in layers:
            each.counts += torch.tensor([5, 5, 0, 0])
    assert moved == set(range(6))
