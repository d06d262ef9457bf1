"""The KV pool: how many blocks there are room for, and the tensor that holds them."""

from pathlib import Path

import torch

from tokenmesh.services.worker_svc.models.config import DecoderConfig
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

_GIB = 1 << 30
_MEMINFO = Path("/proc/meminfo")


def block_bytes(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    per_token = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    return per_token * block_size * len(config.layers)


def count_blocks(
    config: DecoderConfig, settings: WorkerSettings, dtype: torch.dtype, max_model_len: int
) -> int:
    """Blocks of the pool, the null block included.

    Raises ConfigError when a single request of full length would not fit.
    """
    size = block_bytes(config, settings.block_size, dtype)
    needed = 1 + -(-max_model_len // settings.block_size)
    if settings.num_gpu_blocks_override is not None:
        count, source = settings.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif settings.kv_cache_memory_bytes is not None:
        count, source = settings.kv_cache_memory_bytes // size, "kv_cache_memory_bytes"
    else:
        share = settings.cpu_memory_utilization * available_bytes()
        # More than every row at full length can never be used.
        count = min(int(share) // size, 1 + settings.max_num_seqs * (needed - 1))
        source = "cpu_memory_utilization"
    if count < needed:
        missing = (needed - count) * size / _GIB
        raise ConfigError(
            f"the KV cache has room for {max(0, count - 1) * settings.block_size} tokens, and one "
            f"request may need {max_model_len}: {missing:.2f} GiB are missing; "
            f"raise {source} or lower max_model_len",
            param=source,
        )
    return count


def available_bytes() -> int:
    """Host memory that can be had without swapping."""
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{_MEMINFO} does not tell how much memory is available")


def make_pool(
    config: DecoderConfig, num_blocks: int, block_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """[layers, 2, blocks, kv_heads, page_size, head_dim], not initialized: pages that no request
    ever used cost no memory."""
    return torch.empty(
        (len(config.layers), 2, num_blocks, config.num_kv_heads, block_size, config.head_dim),
        dtype=dtype,
    )
