"""Tile sizes, warps and stages by device, from tiles.json; `tune.py` writes that file.

A device has a list, and a launch takes the first entry for as many rows as an expert has on
average. So a token's last bits depend on how full the step is, across such a border.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from tokenmesh.kernels.quantized_linear.device_codes import CHUNK

PATH: Final = Path(__file__).with_name("tiles.json")
DEFAULT: Final = "default"
_FAMILIES: Final = ("H200",)
"""Devices whose names go on, by what they are built into, with equal processors."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tile:
    """Tiles of one product; the fields are arguments of its launch."""

    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """For launches with at most `max_rows` rows an expert; None: for all."""

    max_rows: int | None
    block_m: int
    """Rows of a tile; both products share the sorting by blocks."""
    first: Tile
    second: Tile


def device_key(name: str) -> str:
    """The device's name in the file: blanks are underscores, and a family has one, as in vLLM."""
    words = name.replace("_", " ").split()
    family = next((each for each in _FAMILIES if each in words), None)
    return "_".join(words) if family is None else f"NVIDIA_{family}"


def read_tiles(path: Path = PATH) -> dict[str, tuple[Tiles, ...]]:
    """Device keys to their entries, those of the fewest rows first."""
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text("utf-8"))
    return {device_key(name): tuple(map(_entry, entries)) for name, entries in found.items()}


def _entry(fields: Mapping[str, Any]) -> Tiles:
    first, second = Tile(**fields["first"]), Tile(**fields["second"])
    return Tiles(fields["max_rows"], fields["block_m"], first, second)


def write_tiles(tiles: Mapping[str, tuple[Tiles, ...]], path: Path = PATH) -> None:
    """The inverse of `read_tiles`."""
    fields = {device: [asdict(each) for each in tiles[device]] for device in sorted(tiles)}
    path.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


@lru_cache(maxsize=16)
def tiles_of(device: int | None) -> tuple[Tiles, ...]:
    """The entries of a device, those of the fewest rows first."""
    tiles = read_tiles()
    if not torch.cuda.is_available():
        return tiles[DEFAULT]
    name = device_key(torch.cuda.get_device_name(device))
    if name not in tiles:
        logger.warning(
            "experts run with tiles for no device in particular: %s has none for %s; "
            "python -m tokenmesh.kernels.moe.tune finds some",
            *(PATH, name),
        )
    return tiles.get(name, tiles[DEFAULT])


def choose_tiles(num_pairs: int, num_experts: int, x: torch.Tensor) -> Tiles:
    """For num_pairs spread over num_experts, on x's device and in its dtype."""
    entries = tiles_of(x.device.index)
    rows = num_pairs / num_experts
    tiles = next(each for each in entries if each.max_rows is None or rows <= each.max_rows)
    return for_float32(tiles) if x.dtype == torch.float32 else tiles


def for_float32(tiles: Tiles) -> Tiles:
    """Twice the bytes and three products for one: for tests and small models, need not be fast."""

    def smaller(tile: Tile) -> Tile:
        return replace(tile, BLOCK_N=32, BLOCK_K=32, num_stages=2)

    return replace(tiles, first=smaller(tiles.first), second=smaller(tiles.second))


def for_codes(tile: Tile) -> Tile:
    """The tile of a product whose weights are codes: a step reads whole chunks of them, and a
    decoded tile takes registers."""
    return replace(tile, BLOCK_N=min(tile.BLOCK_N, 64), BLOCK_K=CHUNK, num_stages=3)
