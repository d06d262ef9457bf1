"""The type of KV pages, by `worker.kv_cache_dtype`."""

from typing import Final

import torch

from tokenmesh.engine.exec.features import NO_INT8_PAGES
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.kernels.capability import e4m3_problem
from tokenmesh.shared.config.worker import KvCacheDtype, WorkerSettings
from tokenmesh.shared.errors import ConfigError

_CODED: Final[dict[KvCacheDtype, torch.dtype]] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
PARAM: Final = "worker.kv_cache_dtype"


def page_dtype_of(
    settings: WorkerSettings, dtype: torch.dtype, device: torch.device, raw: RawConfig
) -> torch.dtype:
    """Return the type of pages of a model that computes in `dtype`.

    Raises ConfigError for what is not served.
    """
    asked = settings.kv_cache_dtype
    if asked == "auto":
        return dtype
    if asked == "bfloat16":
        if dtype != torch.bfloat16:
            computed = str(dtype).removeprefix("torch.")
            problem = f"is bfloat16, and the model computes in {computed}"
            raise ConfigError(f"kv_cache_dtype {problem}; set dtype to bfloat16", param=PARAM)
        return dtype
    text = raw.part("text_config") or raw
    if text.values.get("index_topk"):
        problem = "with sparse attention by an indexer the KV cache has the model's own type"
        raise ConfigError(f"{problem}; leave kv_cache_dtype out", param=PARAM)
    if device.type == "cuda" and asked == "int8":
        raise ConfigError(NO_INT8_PAGES, param=PARAM)
    found = _CODED[asked]
    lacks = e4m3_problem(device) if found == torch.float8_e4m3fn else None
    if lacks is not None:
        raise ConfigError(f"kv_cache_dtype {asked}: {lacks}; it has fp8_e5m2", param=PARAM)
    return found
