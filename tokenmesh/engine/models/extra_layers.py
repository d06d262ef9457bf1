"""Layers behind the last one that predict further tokens; `tree/mtp.py` reads the first one.

config.json counts them, and checkpoints number them on (`layers.61` behind 61 layers) or keep them
under a name of their own (`mtp`).
"""

import re
from collections.abc import Mapping
from typing import Final

from tokenmesh.engine.models.raw_config import RawConfig

_COUNTS: Final = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of config.json that count them."""
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MODULE: Final = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")


def extra_layers(raw: RawConfig, num_layers: int | None) -> range:
    """Their numbers, by config.json. Raises CheckpointError for a count that is none.

    num_layers: None: the model's own layers are not counted, so that none is behind them.
    """
    _, count = counted(raw)
    return range(0) if num_layers is None else range(num_layers, num_layers + count)


def counted(raw: RawConfig) -> tuple[str, int]:
    """The key that counts them, and their number. Raises CheckpointError."""
    for part in (raw, RawConfig(_text_of(raw), f"{raw.origin}: text_config")):
        for key in _COUNTS:
            if count := part.integer(key, 0, minimum=0):
                return key, count
    return _COUNTS[0], 0


def _text_of(raw: RawConfig) -> Mapping[str, object]:
    text = raw.values.get("text_config")
    return text if isinstance(text, Mapping) else {}


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor is of."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def is_extra(name: str, layers: range) -> bool:
    """Return whether a tensor is of one of these extra layers."""
    return layer_of(name) in layers or (len(layers) > 0 and _MODULE.search(name) is not None)
