"""The type that a model's weights and activations have, by settings, checkpoint and device."""

import logging
from pathlib import Path
from typing import Final

import torch

from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.kernels.linear import can_pack
from tokenmesh.shared.config.model import ModelSettings

logger = logging.getLogger(__name__)

SMALL_CHECKPOINT_BYTES: Final = 64 << 20
"""Below this, weights stay in the processor's caches and float32 is faster than bfloat16."""

_HALVES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPES: Final = {"float32": torch.float32, **_HALVES}


def choose_dtype(
    model: ModelSettings,
    facts: ModelFacts,
    directory: Path,
    device: torch.device,
    native: bool = False,
) -> torch.dtype:
    """Return what the settings say; with "auto" half the size if the checkpoint is, where that is
    fast.

    native: the C kernels compute the model's products. They are fast in bfloat16 everywhere.

    A GPU takes the checkpoint's own type. A CPU does not compute in float16 and says so in the log.
    """
    chosen = facts.dtype if model.dtype == "auto" else model.dtype
    if device.type == "cuda":
        return _DTYPES.get(chosen or "", torch.float32)
    if model.dtype in ("float32", "bfloat16"):
        return _DTYPES[model.dtype]
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    is_fast = size >= SMALL_CHECKPOINT_BYTES and (native or can_pack(torch.bfloat16))
    dtype = torch.bfloat16 if chosen in _HALVES and is_fast else torch.float32
    if chosen == "float16":
        loss = ", which drops 3 bits of each weight; float32 drops none"
        logger.warning(
            "float16 is computed in %s on a CPU%s",
            str(dtype).removeprefix("torch."),
            loss if dtype == torch.bfloat16 else "",
        )
    return dtype
