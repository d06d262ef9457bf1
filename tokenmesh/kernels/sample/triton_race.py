"""race: the best logit of every block and, where no filter stands before it, the draw's winner."""

import triton
import triton.language as tl

from tokenmesh.kernels.exponential_noise.triton import exponential_from


@triton.jit
def load_scaled(row_ptr, offs, vocab_size, temperature):
    """logits / temperature, float32, rounded as the CPU rounds; greedy rows are left as they are.

    Past the vocabulary: minus infinity.
    """
    x = tl.load(row_ptr + offs, mask=offs < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def has_filter(row, vocab_size, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr):
    """Return whether the row is random and any of min_p, top_k and top_p does anything."""
    top_k = tl.load(top_k_ptr + row)
    keeps_fewer = (top_k > 0) & (top_k < vocab_size)
    keeps_fewer |= (tl.load(min_p_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1)
    return keeps_fewer & (tl.load(temperature_ptr + row) > 0)


@triton.jit
def race_kernel(
    logits_ptr,  # [N, V]
    stride_n,
    idx_mapping_ptr,  # [N]
    temperature_ptr,  # [R], as the next four
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    positions_ptr,  # [N]
    best_ptr,  # [N, blocks] out: largest logit / temperature; infinity when one is not a number
    score_ptr,  # [N, blocks] out: the winner's weight, as if its block's best were 1, / noise
    token_ptr,  # [N, blocks] out: the winner
    vocab_size,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + n).to(tl.int64)
    if row < 0:
        return
    temperature = tl.load(temperature_ptr + row)
    start = tl.program_id(1) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    x = load_scaled(logits_ptr + n * stride_n, offs, vocab_size, temperature)
    is_broken = (x != x) | (x == float("inf"))
    x = tl.where(is_broken, float("-inf"), x)
    best, place = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    score = tl.zeros((), tl.float32)
    if temperature > 0:
        if has_filter(row, vocab_size, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr) == 0:
            seed, position = tl.load(seed_ptr + row), tl.load(positions_ptr + n)
            # a block where nothing is allowed has no best to subtract
            weight = tl.exp(x - tl.where(best == float("-inf"), 0.0, best))
            score, place = tl.max(
                weight / exponential_from(seed, position, start, BLOCK),
                axis=0,
                return_indices=True,
                return_indices_tie_break_left=True,
            )
    is_any_broken = tl.max(is_broken.to(tl.int32), axis=0) > 0
    partial = n * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + partial, tl.where(is_any_broken, float("inf"), best))
    tl.store(score_ptr + partial, score)
    tl.store(token_ptr + partial, start + place)
