"""Tell how many streams a decoder runs whose rows keep what an encoder has computed.

Each row has its own keys and values of cross attention, also while it is free: 256 rows of a
whisper-base in float32 are 9 GiB.
"""

import logging
from typing import Final

from tokenmesh.engine.host_memory import available_host_bytes
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.raw_config import RawConfig, read_config
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

_FAMILY: Final = "whisper"
_MOST_BYTES: Final = 2 << 30
"""It bounds the bytes of all rows, as of a pool in host memory whose size is not set: other
programs run, too."""
_SHARE: Final = 0.5
"""Rows may take this share of the memory for the KV cache; the rest is for blocks, and the weights
are not loaded yet."""
_PAIRS: Final = 2
"""Keys and values."""

logger = logging.getLogger(__name__)


def with_fitting_rows(model: ModelSettings, worker: WorkerSettings) -> WorkerSettings:
    """The settings with as many streams as there is memory for; as they are where max_num_seqs is
    set, and for other models. Raises CheckpointError."""
    default = WorkerSettings.model_fields["max_num_seqs"].default
    raw = read_config(locate(model, with_code=model.trust_remote_code))
    if raw.get("model_type") != _FAMILY or worker.max_num_seqs != default:
        return worker
    room = min(_MOST_BYTES, int(_SHARE * worker.cpu_memory_utilization * available_host_bytes()))
    rows = max(1, min(default, room // _row_bytes(model, raw)))
    logger.info("max_num_seqs is %d: their cross attention takes at most %d bytes", rows, room)
    return worker.model_copy(update={"max_num_seqs": rows})


def _row_bytes(model: ModelSettings, raw: RawConfig) -> int:
    """At most: a checkpoint of 16 bits is computed so, except a small one."""
    sizes = [raw.get(name) for name in ("decoder_layers", "max_source_positions", "d_model")]
    if not all(isinstance(each, int) and each > 0 for each in sizes):
        return 1  # who reads the config refuses it
    layers, states, hidden = sizes
    stated = model.dtype if model.dtype != "auto" else raw.get("dtype") or raw.get("torch_dtype")
    return int(layers * _PAIRS * states * hidden * (2 if stated in ("bfloat16", "float16") else 4))
