"""Sums and gathers over ranks, as threads of this process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroupGloo

from tokenmesh.engine.ranks.ranks import GATHERED_NUMBERS, Ranks


def on_ranks(world: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Return what each rank does."""
    store = HashStore()

    def run(rank: int) -> Any:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        return work(Ranks(rank, world, gloo(store, rank, world, options)))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def part_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator).mul_(10**rank).to(dtype)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_depends_neither_on_the_rank_nor_on_the_batch(world: int, dtype: torch.dtype) -> None:
    few, many = 100, GATHERED_NUMBERS + 7

    def work(ranks: Ranks) -> list[torch.Tensor]:
        part = part_of(ranks.rank, many, dtype)
        return [ranks.sum_(part[:few].clone()), ranks.sum_(part.clone())]

    found = on_ranks(world, work)
    total = part_of(0, many, dtype).float()
    for rank in range(1, world):
        total = total + part_of(rank, many, dtype).float()
    for small, large in found:
        assert torch.equal(large, total.to(dtype))
        assert torch.equal(small, large[:few])


@pytest.mark.parametrize("world", [2, 3])
def test_parts_of_a_vocabulary_meet_on_the_leader(world: int) -> None:
    whole = torch.randn(5, 11)

    def work(ranks: Ranks) -> list[torch.Tensor]:
        part = whole[:, ranks.padded_part(11)]
        into = whole.new_empty(5, 11)
        return [ranks.gather(part, 11), ranks.gather(part, 11, into)]

    leader, *others = on_ranks(world, work)
    assert all(torch.equal(each, whole) for each in leader)
    assert {each.shape for found in others for each in found} == {(5, 0)}


def test_the_least_of_all_ranks_is_known_to_all() -> None:
    def work(ranks: Ranks) -> tuple[int, bool, bool]:
        return ranks.least(7 - ranks.rank), ranks.agree(True), ranks.agree(ranks.rank != 1)

    assert on_ranks(3, work) == [(5, True, False)] * 3


def test_one_rank_sums_nothing() -> None:
    alone, x = Ranks(), torch.ones(3)
    assert alone.sum_(x) is x
    assert alone.least(4) == 4
    assert alone.num_sums == 0
