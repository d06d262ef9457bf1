"""Copies of blocks to images and back, in torch and in C."""

import pytest
import torch

from tests.ops.native import WAYS, in_avx2, way
from tokenmesh.kernels.kv_blocks import (
    copy_in,
    copy_in_reference,
    copy_out,
    copy_out_reference,
    cpu,
)

CASES = [(3, 64, [4, 1, 6], 0), (1, 37, [2], 5), (8, 4096, list(range(7)), 0), (2, 16, [], 3)]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@in_avx2
@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize(("pieces", "size", "blocks", "first"), CASES)
def test_images_hold_the_pieces_of_their_blocks_and_nothing_else_changes(
    pieces: int, size: int, blocks: list[int], first: int, native: bool, instructions: None
) -> None:
    torch.manual_seed(0)
    pool, images = numbers(pieces, 7, size), numbers(9, first + pieces * size + 3)
    ids = torch.tensor(blocks, dtype=torch.int64)
    slots = torch.randperm(9)[: len(blocks)]
    with way(cpu, native):
        for copy, reference in ((copy_out, copy_out_reference), (copy_in, copy_in_reference)):
            there = [pool.clone(), images.clone()]
            expected = [pool.clone(), images.clone()]
            reference(expected[0], ids, expected[1], slots, first)
            copy(there[0], ids, there[1], slots, first)
            assert all(map(torch.equal, there, expected))


@pytest.mark.parametrize("native", WAYS)
def test_a_block_that_went_out_comes_back_as_it_was(native: bool) -> None:
    torch.manual_seed(0)
    pool, other = numbers(4, 6, 128), numbers(4, 6, 128)
    images = numbers(5, 4 * 128)
    with way(cpu, native):
        copy_out(pool, torch.tensor([1, 5]), images, torch.tensor([4, 0]))
        copy_in(other, torch.tensor([2, 3]), images, torch.tensor([4, 0]))
    assert torch.equal(other[:, [2, 3]], pool[:, [1, 5]])
