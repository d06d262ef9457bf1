"""Times the experts on a GPU, for `tune.py`."""

from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from tokenmesh.kernels.moe.spec import ExpertsSpec
from tokenmesh.kernels.moe.triton import run_tiles
from tokenmesh.kernels.moe.triton_tiles import Tiles


def timer(
    tokens: int, top_k: int, num_experts: int, hidden: int, inner: int
) -> Callable[[Tiles], float | None]:
    """Milliseconds with given tiles, in bfloat16; None when they do not fit the device."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    x, w13 = draw(tokens, hidden), draw(num_experts, 2 * inner, hidden)
    w2 = draw(num_experts, hidden, inner)
    weights, ids = torch.rand(tokens, num_experts, device="cuda").topk(top_k)

    def time_of(tiles: Tiles) -> float | None:
        def run() -> torch.Tensor:
            return run_tiles(x, ids, weights, w13, w2, ExpertsSpec(), tiles)

        try:
            return float(do_bench(run, return_mode="median"))
        except OutOfResources:
            return None

    return time_of


def interpreted_timer(
    top_k: int, num_experts: int, hidden: int, inner: int
) -> Callable[[Tiles], float | None]:
    """The same for two tokens in Triton's interpreter, in float32: for tests of the tuner."""
    x, w13 = torch.randn(2, hidden), torch.randn(num_experts, 2 * inner, hidden)
    w2 = torch.randn(num_experts, hidden, inner)
    weights, ids = torch.rand(2, num_experts).topk(top_k)

    def time_of(tiles: Tiles) -> float | None:
        def run() -> torch.Tensor:
            return run_tiles(x, ids, weights, w13, w2, ExpertsSpec(), tiles)

        return 1e3 * float(Timer("run()", globals={"run": run}).timeit(1).mean)

    return time_of
