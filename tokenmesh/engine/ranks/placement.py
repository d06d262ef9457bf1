"""Choose slots of ranks for experts, so that all ranks have about equally much to compute.

The algorithm is the published one for load balancing of experts: experts with most tokens get
further copies, and copies are packed onto nodes, then onto their ranks.

L layers, E experts, S slots.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Loads = npt.NDArray[np.float64]


def packed(loads: Loads, packs: int) -> tuple[Numbers, Numbers]:
    """loads [L, n] -> pack and place within it [L, n]: n / packs in each, the heaviest first to the
    lightest pack that has room."""
    layers, count = loads.shape
    each = count // packs
    pack, place = np.zeros((2, layers, count), np.int64)
    if each == 1:
        pack[:] = np.arange(packs)
        return pack, place
    sums, sizes = np.zeros((layers, packs)), np.zeros((layers, packs), np.int64)
    layer = np.arange(layers)
    for item in np.argsort(-loads, axis=1, kind="stable").T:
        chosen = np.where(sizes < each, sums, np.inf).argmin(1)
        pack[layer, item], place[layer, item] = chosen, sizes[layer, chosen]
        sums[layer, chosen] += loads[layer, item]
        sizes[layer, chosen] += 1
    return pack, place


def copied(loads: Loads, slots: int) -> tuple[Numbers, Numbers]:
    """loads [L, n] -> the expert of each slot [L, slots] and the copies of each expert [L, n]: each
    has one, and a further one goes where a copy has most to do."""
    layers, count = loads.shape
    experts = np.tile(np.arange(slots) % count, (layers, 1))
    copies = np.ones((layers, count), np.int64)
    layer = np.arange(layers)
    for slot in range(count, slots):
        chosen = (loads / copies).argmax(1)
        experts[:, slot] = chosen
        copies[layer, chosen] += 1
    return experts, copies


def placed(loads: Any, slots: int, groups: int, nodes: int, ranks: int) -> Numbers:
    """loads [L, E] -> the expert of each slot [L, S], ranks one after the other.

    groups: of experts, of which a token's are few; each stays on one node, where nodes divide their
    number, else nodes do not count.
    """
    loads = np.asarray(loads, np.float64)
    if groups % nodes:
        groups = nodes = 1
    layers, count = loads.shape
    size = count // groups
    node, place = packed(loads.reshape(layers, groups, size).sum(2), nodes)
    # experts in the order of nodes
    first = (node * (groups // nodes) + place) * size
    moved = (first[:, :, None] + np.arange(size)).reshape(layers, count)
    original = _inverse(moved)
    by_node = np.take_along_axis(loads, original, 1).reshape(layers * nodes, count // nodes)
    experts, copies = copied(by_node, slots // nodes)
    shares = np.take_along_axis(by_node / copies, experts, 1)
    rank, place = packed(shares, ranks // nodes)
    slot = rank * (slots // ranks) + place
    within = np.take_along_axis(experts, _inverse(slot), 1).reshape(layers, nodes, -1)
    offsets = np.arange(0, count, count // nodes)[None, :, None]
    return np.take_along_axis(original, (within + offsets).reshape(layers, slots), 1)


def _inverse(order: Numbers) -> Numbers:
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.arange(order.shape[1])[None], 1)
    return found


def imbalance(loads: Any, slots: Sequence[int], ranks: int) -> float:
    """Return how much the most loaded rank has to compute, in means of all; 1 without loads."""
    loads, copies = np.asarray(loads, np.float64), Counter(slots)
    if not loads.sum():
        return 1.0
    shares = np.array([loads[each] / copies[each] for each in slots]).reshape(ranks, -1).sum(1)
    return float(shares.max() / shares.mean())


def kept_in_place(before: Sequence[int], after: Sequence[int], ranks: int) -> list[int]:
    """`after`, each rank's slots in an order that leaves as many as possible as they are."""
    each, found = len(before) // ranks, list[int]()
    for first in range(0, len(before), each):
        left = Counter(after[first : first + each])
        own: list[int | None] = []
        for expert in before[first : first + each]:
            stays = left[expert] > 0
            left[expert] -= stays
            own.append(expert if stays else None)
        others = list(left.elements())
        found += [others.pop() if expert is None else expert for expert in own]
    return found


class Move(NamedTuple):
    """The expert of a slot goes to another one."""

    source: int
    target: int
    swaps: bool
    """The expert of `target` goes to `source`; else it has another copy."""


def moves(before: Sequence[int], after: Sequence[int]) -> Iterator[Move]:
    """One by one; between two of them each expert is somewhere."""
    now, wanted = list(before), list(after)
    surplus = Counter(now)
    surplus.subtract(wanted)
    while True:
        wrong = [slot for slot, expert in enumerate(now) if expert != wanted[slot]]
        if not wrong:
            return
        free = next((slot for slot in wrong if surplus[now[slot]] > 0), None)
        target = wrong[0] if free is None else free
        found = [slot for slot, expert in enumerate(now) if expert == wanted[target]]
        source = next((slot for slot in found if wanted[slot] != now[slot]), found[0])
        move = Move(source, target, free is None)
        if free is None:
            now[source], now[target] = now[target], now[source]
        else:
            surplus[now[target]] -= 1
            surplus[now[source]] += 1
            now[target] = now[source]
        yield move
