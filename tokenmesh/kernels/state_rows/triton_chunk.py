"""Functions of all chunked kernels of states: the tokens of a program's row, and sums."""

import triton
import triton.language as tl


def max_chunks(num_tokens: int, num_rows: int, size: int) -> int:
    """Chunks that `find_chunk` distinguishes: a launch has a program for each."""
    return num_tokens // size + 2 * num_rows


@triton.jit
def find_chunk(cu_q, number, num_rows, SIZE: tl.constexpr):
    """Row of chunk `number`, the row's first token, how many it has, the chunk's number in the row.

    A row of n tokens touches at most n // SIZE + 2 chunks, wherever their borders are, so row r
    begins with chunk cu_q[r] // SIZE + 2 * r. Those it does not need lie past its tokens.
    """
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_q + middle) // SIZE + 2 * middle <= number:
            low = middle
        else:
            high = middle
    first = tl.load(cu_q + low)
    length = tl.load(cu_q + low + 1) - first
    return low, first, length, number - first // SIZE - 2 * low


@triton.jit
def running_sum(values, place):
    """values [n, 1], place [n, 1] from 0 to n - 1 -> [n, 1]: the sum of all values up to each.

    A sum under a triangle: Triton 3.6 cannot compile `tl.cumsum` of a column whose layout is that
    of a product on Hopper.
    """
    under = tl.where(place >= tl.trans(place), tl.trans(values), 0.0)
    return tl.sum(under, axis=1)[:, None]
