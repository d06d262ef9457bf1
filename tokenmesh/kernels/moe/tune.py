"""Choose tiles for the GPU of this machine and write them to tiles.json.

    python -m tokenmesh.kernels.moe.tune --experts 128 --top-k 8 --hidden 2048 --inner 768

The entry is for the device and holds for all models on it: take the shape of one that matters.
About 300 variants are compiled, which takes a quarter of an hour; `--most` bounds how many are
tried for each height. The file is written after each border.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final

import torch

from tokenmesh.kernels.moe.triton_tiles import (
    PATH,
    Tile,
    Tiles,
    device_key,
    read_tiles,
    write_tiles,
)

BORDERS: Final = (4, 16, 64, None)
"""Rows an expert up to which an entry holds."""
_MOST_ROWS: Final = 256
"""Rows an expert that the last entry is tuned for."""
_FIRST_TRY: Final = Tile(BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3)

TimeOf = Callable[[Tiles], float | None]
"""Milliseconds with these tiles; None: they do not fit the device."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes of the experts of a layer."""

    experts: int
    top_k: int
    hidden: int
    inner: int


def tile_candidates(most: int | None = None) -> list[Tile]:
    """Candidate tiles of one product; at most this many, spread over the whole list."""
    every = [Tile(*each) for each in product((32, 64, 128), (64, 128), (4, 8), (3, 4, 5))]
    count = len(every) if most is None else min(most, len(every))
    return [every[(2 * place + 1) * len(every) // (2 * count)] for place in range(count)]


def choose(border: int | None, time_of: TimeOf, most: int | None = None) -> Tiles:
    """The fastest for one border: the first product for each height, then the second.

    most: see `tile_candidates`. Raises ValueError when nothing fits the device.
    """
    best: tuple[float, Tiles] | None = None
    candidates = tile_candidates(most)
    for block_m in (16, 32, 64, 128):
        start = Tiles(border, block_m, _FIRST_TRY, _FIRST_TRY)
        found = _fastest((replace(start, first=each) for each in candidates), time_of)
        if found is not None:
            others = (replace(found[1], second=each) for each in candidates)
            found = _fastest(others, time_of)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        raise ValueError("no tile fits this device")
    return best[1]


def _fastest(tiles: Iterator[Tiles], time_of: TimeOf) -> tuple[float, Tiles] | None:
    timed = [(time, each) for each in tiles if (time := time_of(each)) is not None]
    return min(timed, key=lambda pair: pair[0], default=None)


def tune(
    shape: ExpertsShape,
    device: str,
    path: Path,
    timer_of: Callable[[int | None], TimeOf],
    most: int | None = None,
) -> None:
    """Add the device to the file at path, or replace it there; a new file begins with the others.

    most: see `tile_candidates`. Until a border's turn comes, the entry before it holds there too.
    """
    known, device = read_tiles(path if path.exists() else PATH), device_key(device)
    entries: list[Tiles] = []
    for border in BORDERS:
        entry = choose(border, timer_of(border), most)
        entries.append(entry)
        so_far = (*entries[:-1], replace(entry, max_rows=None))
        write_tiles({**known, device: so_far}, path)
        sys.stdout.write(f"{device}, {shape}: {entry}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in ("experts", "top-k", "hidden", "inner"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument("--most", type=int, help="tiles to try for each height and product")
    parser.add_argument(
        "--interpreted", action="store_true", help="try it with TRITON_INTERPRET=1 and no GPU"
    )
    options = parser.parse_args(arguments)
    shape = ExpertsShape(options.experts, options.top_k, options.hidden, options.inner)
    if not (options.interpreted or torch.cuda.is_available()):
        parser.error("no GPU found to tune for")
    device = "interpreter" if options.interpreted else torch.cuda.get_device_name()

    def timer_of(border: int | None) -> TimeOf:
        from tokenmesh.kernels.moe.triton_timer import interpreted_timer, timer

        rows = border or _MOST_ROWS
        tokens = max(1, rows * shape.experts // shape.top_k)
        sizes = (shape.top_k, shape.experts, shape.hidden, shape.inner)
        return interpreted_timer(*sizes) if options.interpreted else timer(tokens, *sizes)

    tune(shape, device, options.out, timer_of, options.most)


if __name__ == "__main__":
    main()
