"""Assigns pairs of a token and an expert to programs: a counting sort on the device.

The pairs of an expert are divided into blocks of BLOCK_M. How many blocks there are is not known on
the host, which launches as many as there can be.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    ids_ptr,  # [P]
    ranks_ptr,  # [P] out: a pair's place among those of its expert
    counts_ptr,  # [E] zeros; out: pairs
    num_pairs,
    num_experts,
    BLOCK: tl.constexpr,
):
    """Ranks differ from run to run. They decide where a pair is computed, not what comes out."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    is_here = (expert >= 0) & (expert < num_experts)
    counts = counts_ptr + tl.where(is_here, expert, 0)
    rank = tl.atomic_add(counts, 1, mask=is_here, sem="relaxed")
    tl.store(ranks_ptr + pair, rank, mask=is_here)


@triton.jit
def start_kernel(
    counts_ptr,  # [E]
    first_ptr,  # [E + 1] out: the first place of each expert's pairs
    block_ends_ptr,  # [E] out: blocks of this expert and those before it
    num_experts,
    EXPERTS: tl.constexpr,  # a power of 2
    BLOCK_M: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    mask = expert < num_experts
    count = tl.load(counts_ptr + expert, mask=mask, other=0)
    ends = tl.cumsum(count, 0)
    tl.store(first_ptr + expert, ends - count, mask=mask)
    tl.store(first_ptr + num_experts, tl.sum(count, 0))
    tl.store(block_ends_ptr + expert, tl.cumsum((count + BLOCK_M - 1) // BLOCK_M, 0), mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    ids_ptr,  # [P]
    ranks_ptr,  # [P]
    first_ptr,  # [E + 1]
    pairs_ptr,  # [P] out: the pair at each place
    num_pairs,
    num_experts,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    is_here = (expert >= 0) & (expert < num_experts)
    first = tl.load(first_ptr + expert, mask=is_here, other=0)
    rank = tl.load(ranks_ptr + pair, mask=is_here, other=0)
    tl.store(pairs_ptr + first + rank, pair, mask=is_here)


@triton.jit
def find_block(
    pairs_ptr, first_ptr, block_ends_ptr, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """This program's expert, num_experts when there is nothing to do; its pairs, and their mask."""
    block = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    ends = tl.load(block_ends_ptr + index, mask=index < num_experts, other=0x7FFFFFFF)
    is_before = ends <= block
    expert = tl.sum(is_before.to(tl.int32), 0)
    first_block = tl.max(tl.where(is_before, ends, 0), 0)
    is_any = expert < num_experts
    first = tl.load(first_ptr + expert, mask=is_any, other=0)
    end = tl.load(first_ptr + expert + 1, mask=is_any, other=0)
    place = first + (block - first_block) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = place < end
    pair = tl.load(pairs_ptr + place, mask=mask, other=0)
    return expert, pair.to(tl.int64), mask
