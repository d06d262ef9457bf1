"""The KV pool: what there is room for, as blocks and as slots for saved states."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from tokenmesh.engine.device_memory import DeviceMemory
from tokenmesh.engine.kv.block_pool import KvGroups
from tokenmesh.engine.models.keeps import (
    Grouping,
    LayerKeeps,
    cross_bytes,
    row_bytes,
    token_bytes,
)
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_GIB: Final = 1 << 30
HOST_POOL_BYTES: Final = 2 << 30
_HOST_REQUESTS: Final = 4
"""Without a setting, a pool in host memory takes at most this, or what so many requests of
full length need: a laptop runs other programs, too."""
_SAVED_SHARE: Final = 0.25
"""Saved states may take this share of the memory for blocks. A saved state may take as much as the
keys and values of thousands of tokens, and a saved state without blocks is useless."""
_SAVED_PER_ROW: Final = 2
_EMPTY_BLOCKS: Final = 1 << 18
"""Most blocks that hold nothing, for more than one request: each still is an entry of the pool."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory for the pool, and where it comes from."""

    num_bytes: int
    """May be negative: so much is missing before the pool holds anything."""
    setting: str
    """It says which setting to raise for more."""
    account: str
    """It says how the number came about."""
    share: float = math.inf
    """The setting's value where it is a share; infinite: raising it would not help."""
    of_bytes: int = 1
    """It holds what the share is of."""
    also_lower: str = ""
    """Settings other than max_model_len that would leave more."""

    def __str__(self) -> str:
        return f"{_gib(max(self.num_bytes, 0))} GiB ({self.account})"


class StoreSize(NamedTuple):
    """It holds what is made once at the start."""

    num_blocks: int
    """The null block included."""
    num_saved: int = 0
    """Slots for saved states."""


@dataclass(frozen=True, slots=True)
class Need:
    """It holds what the model needs of the pool."""

    block_bytes: int
    groups: KvGroups
    max_model_len: int
    row_bytes: int
    """It holds what all rows together keep besides blocks, and saved states whose number is set."""
    state_bytes: int = 0
    """This is the size of one saved state."""
    num_saved: int | None = 0
    """Saved states; None: as many as there is room for, at most `most_saved`."""
    most_saved: int = 0
    may_be_shorter: bool = False
    """It tells whether max_model_len may be lowered to what fits."""

    @property
    def num_blocks(self) -> int:
        """For one request of full length, and the null block."""
        return 1 + self.groups.needed(self.max_model_len)

    @property
    def num_bytes(self) -> int:
        """For one request of full length."""
        return self.num_blocks * self.block_bytes + self.row_bytes

    def longest_in(self, num_blocks: int) -> int:
        """Tokens of the longest request that such a pool holds, at most max_model_len."""
        return min(self.max_model_len, self.groups.longest(num_blocks - 1))

    def size_in(self, num_bytes: int, num_free: int) -> StoreSize:
        """Return what fits once every row has its own; num_free blocks where they take no memory,
        since nothing but rows keeps anything.

        Where the number of saved states is not set, they get a part of what one request of full
        length leaves.
        """
        num_saved, left = self.num_saved, num_bytes - self.row_bytes
        if num_saved is None:
            spare = max(0, num_bytes - self.num_bytes)
            num_saved = min(self.most_saved, int(spare * _SAVED_SHARE) // self.state_bytes)
            left -= num_saved * self.state_bytes
        if not self.block_bytes:
            count = max(self.num_blocks, min(num_free, _EMPTY_BLOCKS))
            return StoreSize(count if left >= 0 else 0, num_saved)
        return StoreSize(left // self.block_bytes, num_saved)


class GpuBudget:
    """Measures what a GPU has left. Make it before anything is loaded."""

    def __init__(self, memory: DeviceMemory, utilization: float) -> None:
        self._memory = memory
        self._utilization = utilization
        self._used_by_others = memory.total() - memory.free() - memory.reserved()

    def measure(self, profile: Callable[[], int]) -> MemoryBudget:
        """Run the largest steps with `profile`; what they and the weights leave of the share.

        `profile` returns bytes of its peak that will not be needed again: its own pool. The share
        is this worker's own, as in vLLM: two workers with 0.45 each fit one GPU. Raises
        ConfigError when the steps themselves do not fit.
        """
        memory = self._memory
        total, weights = memory.total(), memory.allocated()
        memory.reset_peak()
        try:
            passing = profile()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the largest step does not fit next to {_gib(weights)} GiB of weights in "
                f"{_gib(total)}; lower max_num_batched_tokens or max_num_seqs",
                param="max_num_batched_tokens",
            ) from error
        activations = memory.peak() - weights - passing
        memory.release()
        context = total - memory.free() - memory.reserved() - self._used_by_others
        share = int(self._utilization * total)
        left = share - weights - activations - context
        really_free = memory.free() - activations
        account = (
            f"{_gib(share)} GiB ({self._utilization:g} of {_gib(total)}): weights "
            f"{_gib(weights)}, activations {_gib(activations)}, CUDA {_gib(context)}, "
            f"other processes hold {_gib(self._used_by_others)}"
        )
        return MemoryBudget(
            min(left, really_free),
            "gpu_memory_utilization",
            account,
            share=self._utilization if left < really_free else math.inf,
            of_bytes=total,
            also_lower="max_num_batched_tokens or max_num_seqs",
        )


def host_budget(available_bytes: int, utilization: float) -> MemoryBudget:
    """A share of the host memory that is free after the weights were loaded."""
    account = f"{utilization:g} of the {_gib(available_bytes)} GiB that are free"
    num_bytes = int(utilization * available_bytes)
    return MemoryBudget(num_bytes, "cpu_memory_utilization", account, utilization, available_bytes)


def need_of(
    keeps: Sequence[LayerKeeps],
    grouping: Grouping,
    settings: WorkerSettings,
    dtype: torch.dtype,
    max_model_len: int,
    *,
    can_save: bool,
    may_be_shorter: bool = False,
    page_dtype: torch.dtype | None = None,
    draft_bytes: int = 0,
    open_draft_bytes: int = 0,
) -> Need:
    """Memory that layers with these `keeps` need. can_save: whether the runner can copy states.
    page_dtype: of pages and latents; None: dtype. draft_bytes: of a token, for a drafter.
    open_draft_bytes: of all rows, while their drafts are verified."""
    per_token = token_bytes(keeps, grouping, page_dtype or dtype) + draft_bytes
    state_bytes = row_bytes(keeps)
    is_saved = can_save and settings.enable_prefix_caching and state_bytes > 0
    num_saved = settings.saved_states if is_saved else 0
    return Need(
        block_bytes=per_token * settings.block_size,
        groups=KvGroups.of(grouping.windows, settings.block_size, settings.max_num_batched_tokens),
        max_model_len=max_model_len,
        row_bytes=state_bytes * (settings.num_rows + 1 + (num_saved or 0))
        + cross_bytes(keeps, dtype) * settings.num_rows
        + open_draft_bytes,
        state_bytes=state_bytes,
        num_saved=num_saved,
        most_saved=_SAVED_PER_ROW * settings.num_rows,
        may_be_shorter=may_be_shorter,
    )


def size_store(
    need: Need, settings: WorkerSettings, measure: Callable[[], MemoryBudget]
) -> StoreSize:
    """Return what the pool holds; `measure` is called only when no setting says.

    Raises ConfigError when one request of full length does not fit, or of any length where
    max_model_len may be lowered.
    """
    # More than every row at full length can never be used.
    most = 1 + settings.num_rows * (need.num_blocks - 1)
    if settings.num_gpu_blocks_override is not None:
        count = settings.num_gpu_blocks_override
        num_saved = need.most_saved if need.num_saved is None else need.num_saved
        size = StoreSize(count, num_saved)
        num_bytes = count * need.block_bytes + need.row_bytes
        budget = MemoryBudget(num_bytes, "num_gpu_blocks_override", "as set")
    elif settings.kv_cache_memory_bytes is not None:
        num_bytes = settings.kv_cache_memory_bytes
        budget = MemoryBudget(num_bytes, "kv_cache_memory_bytes", "as set")
        size = need.size_in(num_bytes, most)
    else:
        budget = measure()
        room = budget.num_bytes
        if budget.setting == "cpu_memory_utilization" and not _is_set(settings):
            # memory is taken as blocks are first used, and is not given back
            room = min(room, max(HOST_POOL_BYTES, _HOST_REQUESTS * need.num_bytes))
        size = need.size_in(room, most)
        size = size._replace(num_blocks=min(size.num_blocks, most))
    fits = need.longest_in(size.num_blocks)
    if need.may_be_shorter and fits > 0:
        _log_length(need, budget, size)
    elif fits < need.max_model_len:
        raise _too_little(need, budget, fits)
    return size


def _is_set(settings: WorkerSettings) -> bool:
    default = type(settings).model_fields["cpu_memory_utilization"].default
    return bool(settings.cpu_memory_utilization != default)


def _log_length(need: Need, budget: MemoryBudget, size: StoreSize) -> None:
    fits = need.longest_in(size.num_blocks)
    logger.info(
        "max_model_len auto: %d of the %d tokens that the model was made for; a request as long "
        "takes %d of %d KV blocks of %.3f MiB; states of all rows take %s GiB; there are %s",
        fits,
        need.max_model_len,
        need.groups.needed(fits),
        size.num_blocks - 1,
        need.block_bytes / (1 << 20),
        _gib(need.row_bytes),
        budget,
    )


def _too_little(need: Need, budget: MemoryBudget, fits: int) -> ConfigError:
    """Says how much is missing, what to raise to what, and what to lower to what."""
    lower = [f"max_model_len to {fits}" if fits > 0 else "max_model_len"]
    if need.may_be_shorter:
        need, lower = replace(need, max_model_len=1), []
    if budget.also_lower:
        lower.append(budget.also_lower)
    elif need.row_bytes:
        lower.append("max_num_seqs")  # each row has its own states
    wanted = need.num_bytes
    missing = wanted - budget.num_bytes
    advice = _raised(need, budget, missing)
    advice += [f"lower {' or '.join(lower)}"] if lower else []
    return ConfigError(
        f"one request of max_model_len {need.max_model_len} needs {_gib(wanted)} GiB of KV cache "
        f"and there are {budget}: {_gib(missing)} GiB are missing; {' or '.join(advice)}",
        param=budget.setting,
    )


def _raised(need: Need, budget: MemoryBudget, missing: int) -> list[str]:
    """Advice with the smallest value of the setting that would do; empty where none would."""
    value: float
    if budget.setting == "num_gpu_blocks_override":
        value = need.num_blocks
    elif budget.setting == "kv_cache_memory_bytes":
        value = need.num_bytes
    else:
        percent = 100 * (budget.share + missing / budget.of_bytes)
        value = math.ceil(percent) / 100 if percent <= 100 else 0
    return [f"raise {budget.setting} to {value}"] if value else []


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"
