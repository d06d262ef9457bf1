"""Experts on a GPU: sort by expert on the device, two grouped products, and a sum.

Nothing is read back, and the grids depend on the number of tokens alone, so a step of this can be
recorded in a graph.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import torch
import triton

from tokenmesh.kernels.alignment import assert_aligned_rows, padded
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.moe.device_experts import DeviceExperts
from tokenmesh.kernels.moe.spec import ExpertsSpec
from tokenmesh.kernels.moe.triton_align import count_kernel, place_kernel, start_kernel
from tokenmesh.kernels.moe.triton_products import first_kernel, second_kernel, sum_kernel
from tokenmesh.kernels.moe.triton_tiles import Tile, Tiles, choose_tiles, for_codes

__all__ = ["experts", "run_tiles"]

SORT_BLOCK: Final = 256
SUM_BLOCK: Final = 1024

DeviceWeights = torch.Tensor | DeviceExperts
"""[E, outputs, inputs], plain or as codes that are decoded to x's dtype in registers."""


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: DeviceWeights,
    w2: DeviceWeights,
    spec: ExpertsSpec,
) -> torch.Tensor:
    """See the package. Raises ValueError for weights that have not been packed."""
    num_experts = w13.shape[0] if isinstance(w13, torch.Tensor) else w13.num_experts
    tiles = choose_tiles(ids.numel(), num_experts, x)
    return run_tiles(x, ids, weights, w13, w2, spec, tiles)


def run_tiles(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: DeviceWeights,
    w2: DeviceWeights,
    spec: ExpertsSpec,
    tiles: Tiles,
) -> torch.Tensor:
    """`experts` with tiles that are given."""
    if spec.is_transposed or spec.is_interleaved:
        raise ValueError("on a GPU experts that are transposed or interleaved must be packed")
    assert_aligned_rows(x)
    first, second = _Product.of(w13, x, tiles.first), _Product.of(w2, x, tiles.second)
    (num_tokens, top_k), num_experts = ids.shape, first.num_experts
    num_pairs, hidden, inner = ids.numel(), x.shape[1], second.inputs
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    ids, weights = ids.contiguous(), weights.contiguous()
    size = {"EXPERTS": triton.next_power_of_2(num_experts), "BLOCK_M": tiles.block_m}
    places = _sort(ids, num_experts, size)
    blocks = _most_blocks(num_pairs, num_experts, tiles.block_m)
    activated = x.new_empty((num_pairs, padded(inner)))
    first_kernel[(blocks, triton.cdiv(inner, first.tile.BLOCK_N))](
        x, *places, *first.tensors, _contiguous(spec.b13), activated,
        x.stride(0), *first.strides, activated.stride(0),
        hidden, inner, num_experts, first.shift, spec.alpha, spec.limit or 0.0, spec.up_offset,
        TOP_K=top_k, IS_GATED=spec.is_gated, ACTIVATION=spec.activation, LIMITS=limits_of(spec),
        **size, **first.constants, **FUSED,
    )  # fmt: skip
    parts = torch.empty((num_pairs, padded(hidden)), dtype=torch.float32, device=x.device)
    second_kernel[(blocks, triton.cdiv(hidden, second.tile.BLOCK_N))](
        activated, *places, *second.tensors, _contiguous(spec.b2), weights, parts,
        activated.stride(0), *second.strides, parts.stride(0),
        hidden, inner, num_experts, second.shift,
        **size, **second.constants, **FUSED,
    )  # fmt: skip
    sum_kernel[(num_tokens, triton.cdiv(hidden, SUM_BLOCK))](
        parts, ids, out, parts.stride(0), hidden, num_experts,
        TOP_K=top_k, BLOCK=SUM_BLOCK, num_warps=4, **FUSED,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Product:
    """The arguments for the weights in the launch of a product."""

    tensors: tuple[torch.Tensor | None, ...]
    """Weights or codes; of codes: scales, offsets, table, order."""
    strides: tuple[int, int]
    """From expert to expert, and from output to output."""
    num_experts: int
    inputs: int
    tile: Tile
    is_narrow: bool = False
    group: int = 0
    shift: float = 0.0

    @classmethod
    def of(cls, weights: DeviceWeights, x: torch.Tensor, tile: Tile) -> Self:
        if isinstance(weights, torch.Tensor):
            assert x.dtype == weights.dtype
            assert_aligned_rows(weights)
            tensors = weights, None, None, None, None
            strides = weights.stride(0), weights.stride(1)
            return cls(tensors, strides, weights.shape[0], weights.shape[2], tile)
        codes, stride = weights.codes, weights.codes.numbers.stride(0)
        return cls(
            tensors=(codes.numbers, codes.scales, codes.offsets, codes.table, weights.order),
            strides=(weights.out_features * stride, stride),
            num_experts=weights.num_experts,
            inputs=codes.inputs,
            tile=for_codes(tile),
            is_narrow=codes.is_narrow,
            group=0 if codes.group_size >= codes.inputs else codes.group_size,
            shift=codes.shift,
        )

    @property
    def constants(self) -> dict[str, Any]:
        return {"IS_NARROW": self.is_narrow, "GROUP": self.group, **asdict(self.tile)}


def limits_of(spec: ExpertsSpec) -> str:
    """Name what spec.limit bounds besides up."""
    if spec.limit is None:
        return "nothing"
    return "activated" if spec.limits_activated_gate else "gate"


def _sort(ids: torch.Tensor, num_experts: int, size: dict[str, int]) -> tuple[torch.Tensor, ...]:
    """(pairs by place, [E + 1] first place of each expert, [E] where its blocks end)."""
    counts = ids.new_zeros(num_experts, dtype=torch.int32)
    first = ids.new_empty(num_experts + 1, dtype=torch.int32)
    block_ends = ids.new_empty(num_experts, dtype=torch.int32)
    ranks = ids.new_empty(ids.numel(), dtype=torch.int32)
    pairs = ids.new_empty(ids.numel(), dtype=torch.int32)
    grid = (triton.cdiv(ids.numel(), SORT_BLOCK),)
    block = {"BLOCK": SORT_BLOCK, "num_warps": 4, **FUSED}
    count_kernel[grid](ids, ranks, counts, ids.numel(), num_experts, **block)
    start_kernel[(1,)](counts, first, block_ends, num_experts, **size, num_warps=4, **FUSED)
    place_kernel[grid](ids, ranks, first, pairs, ids.numel(), num_experts, **block)
    return pairs, first, block_ends


def _most_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """However the pairs are spread: every expert's last block may be nearly empty."""
    return (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m


def _contiguous(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.contiguous()
