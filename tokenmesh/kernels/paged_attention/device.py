"""DeviceRows: the rows of a step, for paged attention on a GPU."""

from dataclasses import dataclass, replace
from typing import Final, Self

import torch

TARGET_PROGRAMS: Final = 264
"""Programs that a decode launch should have at least: two for each multiprocessor of an H200."""
MIN_SPLIT_KEYS: Final = 128
"""A split is not worth its merge below this many keys."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of a step: those of few tokens first, then the long ones.

    The tensors are written on the device or come with the step's one copy; the numbers are the
    host's, known from the plan. Nothing here reads a tensor back. All tensors start on multiples of
    16 bytes, and the row stride of block_tables is a multiple of 16 elements.

    A graph that was recorded with these numbers fits every step whose rows are as many or fewer:
    a row beyond the last has seq_len 0, and its tokens get zeros.
    """

    cu_q: torch.Tensor
    """[rows + 1] int32: row r has the tokens cu_q[r] to cu_q[r + 1], possibly none."""
    seq_lens: torch.Tensor
    """[rows] int32: each row's keys, its new tokens included; 0 for padding."""
    block_tables: torch.Tensor
    """[rows, columns] int32 block ids; only entries that a row's keys fall into are read."""
    num_short: int
    """Rows that go to the decode kernel; all others go to the prefill kernel."""
    max_short_query: int
    """Most tokens of a short row: 1, or 1 + drafts."""
    num_long_tokens: int
    """Tokens of the long rows, or an upper bound."""
    num_splits: int
    """Parts of a short row's keys that are computed side by side; see choose_splits."""
    window: int | None = None
    """The last positions that a token sees, itself included; None: all."""
    ends: torch.Tensor | None = None
    """[T] int32 `span_ends` of the step, where long rows have spans; None: there are none."""
    has_symmetric_window: bool = False
    """As of `Rows`."""

    def for_window(self, window: int | None) -> Self:
        """The same rows for layers with another window."""
        return replace(self, window=window)


def choose_splits(num_rows: int, kv_heads: int, max_keys: int) -> int:
    """Splits for `num_rows` short rows of at most `max_keys` keys.

    A row shorter than that uses fewer, decided on the device. The result of a row depends on the
    number of splits in its last bits: a batch-invariant step takes 1, or any other constant.
    """
    wanted = -(-TARGET_PROGRAMS // max(1, num_rows * kv_heads))
    return max(1, min(wanted, -(-max_keys // MIN_SPLIT_KEYS)))
