"""grammar_mask on a CPU against its specification."""

import pytest
import torch

from tokenmesh.kernels.grammar_mask import grammar_mask, grammar_mask_reference


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 32, 33, 1000])
@pytest.mark.parametrize("rows", [[], [0], [2, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_specification_says(vocab: int, rows: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=generator).to(dtype)
    logits[0, 0] = float("-inf")
    logits[-1, -1] = float("inf")
    words = torch.empty(len(rows), -(-vocab // 32), dtype=torch.int64)
    masks = words.random_(-(1 << 31), 1 << 31, generator=generator).to(torch.int32)
    wanted = logits.clone()
    grammar_mask_reference(wanted, torch.tensor(rows, dtype=torch.int32), masks)
    grammar_mask(logits, torch.tensor(rows, dtype=torch.int32), masks)
    assert torch.equal(logits, wanted)
