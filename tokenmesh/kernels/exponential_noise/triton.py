"""exponential_noise on a GPU: functions that other kernels inline, and the op by itself.

The bits are equal to the CPU's, and so is the uniform number made of them. The logarithm is not:
each library rounds its own, so the last two bits of the result may differ.
"""

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.exponential_noise.reference import (
    KEY_STEPS,
    MULTIPLIERS,
    ROUNDS,
    exponential_noise_reference,
    noise_bits_reference,
)
from tokenmesh.kernels.exponential_noise.tolerance import TOLERANCE
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.specimen import EXACT, Compilation, Inputs, KernelCase, Limits, Outputs

_BLOCK = 1024
_ROUNDS = tl.constexpr(ROUNDS)
_MULTIPLIER_0 = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_2 = tl.constexpr(MULTIPLIERS[1])
_KEY_STEP_0 = tl.constexpr(KEY_STEPS[0])
_KEY_STEP_1 = tl.constexpr(KEY_STEPS[1])


def exponential_noise(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """seeds, positions [R] int64 -> [R, vocab_size] float32."""
    return _launch(seeds, positions, None, vocab_size, torch.float32)


def exponential_noise_of(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """seeds, positions [R] int64, token_ids [R, n] -> [R, n] float32."""
    return _launch(seeds, positions, token_ids, token_ids.shape[1], torch.float32)


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The 31 random bits behind each number: [R, vocab_size] int32."""
    return _launch(seeds, positions, None, vocab_size, torch.int32)


def noise_bits_of(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """The 31 random bits behind each token's number: [R, n] int32."""
    return _launch(seeds, positions, token_ids, token_ids.shape[1], torch.int32)


def _launch(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor | None,
    size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows = seeds.shape[0]
    out = torch.empty(rows, size, dtype=dtype, device=seeds.device)
    if out.numel():
        ids = None if token_ids is None else token_ids.int().contiguous()
        grid = (rows, triton.cdiv(size, _BLOCK))
        _exponential_noise_kernel[grid](seeds, positions, ids, out, size, BLOCK=_BLOCK, **FUSED)
    return out


@triton.jit
def _multiplied(word, factor: tl.constexpr):
    """uint32 -> upper and lower half of the product."""
    product = word.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(seed, position, blocks):
    """seed, position int64, blocks int32 -> four words each, uint32."""
    seed = seed.to(tl.uint64, bitcast=True)
    position = position.to(tl.int64).to(tl.uint64, bitcast=True)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0 = blocks.to(tl.uint32, bitcast=True)
    c1, c2 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c3 = tl.zeros((), tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _multiplied(c0, _MULTIPLIER_0)
        high2, low2 = _multiplied(c2, _MULTIPLIER_2)
        c0, c2 = high2 ^ c1 ^ k0, high0 ^ c3 ^ k1
        c1, c3 = low2, low0
        k0 += _KEY_STEP_0
        k1 += _KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def _bits_from(seed, position, start, BLOCK: tl.constexpr):
    """31 bits, int32 [BLOCK], for the tokens from `start`, a multiple of 4."""
    w0, w1, w2, w3 = _philox(seed, position, start // 4 + tl.arange(0, BLOCK // 4))
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return (words >> 1).to(tl.int32, bitcast=True)


@triton.jit
def _bits_of(seed, position, token_ids):
    """31 bits for each token id, int32."""
    w0, w1, w2, w3 = _philox(seed, position, token_ids // 4)
    is_odd, is_upper = (token_ids & 1) != 0, (token_ids & 2) != 0
    words = tl.where(is_upper, tl.where(is_odd, w3, w2), tl.where(is_odd, w1, w0))
    return (words >> 1).to(tl.int32, bitcast=True)


@triton.jit
def exponential_of_bits(bits):
    """31 bits, int32 -> -log(1 - u), float32, for u = (bits + 0.5) / 2^31.

    1 - u = m * 2^k with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh((m - 1) / (m + 1)), five terms.
    Small u would lose their bits in 1 - u; there k is 0 and m - 1 is -u itself.
    """
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    rest_bits = (1.0 - uniform).to(tl.int32, bitcast=True)
    k = (rest_bits - 0x3F3504F3) >> 23
    m = (rest_bits - (k << 23)).to(tl.float32, bitcast=True)
    f = tl.where(k == 0, -uniform, m - 1.0)
    s = f / (f + 2.0)
    z = s * s
    series = z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11)))))
    return -(2.0 * s + 2.0 * s * series) - k.to(tl.float32) * 0.6931471805599453


@triton.jit
def exponential_from(seed, position, start, BLOCK: tl.constexpr):
    """The numbers of BLOCK tokens from `start`, a multiple of 4 -> float32."""
    return exponential_of_bits(_bits_from(seed, position, start, BLOCK))


@triton.jit
def exponential_of(seed, position, token_ids):
    """The number of each token id, int32 -> float32."""
    return exponential_of_bits(_bits_of(seed, position, token_ids))


@triton.jit
def _exponential_noise_kernel(
    seeds_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    ids_ptr,  # [R, size] int32, or None for the tokens below size
    out_ptr,  # [R, size] float32, or int32 for the bits
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    mask = offs < size
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    if ids_ptr is None:
        bits = _bits_from(seed, position, start, BLOCK)
    else:
        ids = tl.load(ids_ptr + row * size + offs, mask=mask, other=0)
        bits = _bits_of(seed, position, ids)
    if out_ptr.dtype.element_ty == tl.int32:
        tl.store(out_ptr + row * size + offs, bits, mask=mask)
    else:
        tl.store(out_ptr + row * size + offs, exponential_of_bits(bits), mask=mask)


def specimens() -> list[KernelCase]:
    """Seeds and positions at the ends of their ranges, all tokens and some, an odd size."""
    return [
        _specimen("bits", is_bits=True, of_ids=False),
        _specimen("bits-of-ids", is_bits=True, of_ids=True),
        _specimen("numbers", is_bits=False, of_ids=False),
        _specimen("numbers-of-ids", is_bits=False, of_ids=True),
    ]


def _specimen(name: str, is_bits: bool, of_ids: bool) -> KernelCase:
    def make(_: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        seeds = [0, 1, -5, 2**62 + 3, -(2**63)]
        ids = torch.arange(1027, device=device).repeat(len(seeds), 1)
        if of_ids:
            ids.random_(0, 2**31 - 1, generator=generator)
            ids[:, :5] = torch.tensor([0, 1, 151934, 151935, 2**31 - 1])
        return {
            "seeds": torch.tensor(seeds, device=device),
            "positions": torch.tensor([0, 1, 2, 131071, 2**40], device=device),
            "ids": ids,
        }

    def run(a: Inputs) -> Outputs:
        keys = (a["seeds"], a["positions"])
        if of_ids:
            return {"out": (noise_bits_of if is_bits else exponential_noise_of)(*keys, a["ids"])}
        op = noise_bits if is_bits else exponential_noise
        return {"out": op(*keys, a["ids"].shape[1])}

    def reference(a: Inputs) -> Outputs:
        one = noise_bits_reference if is_bits else exponential_noise_reference
        keys = zip(a["seeds"].tolist(), a["positions"].tolist(), a["ids"].tolist(), strict=True)
        rows = [[one(seed, position, each) for each in ids] for seed, position, ids in keys]
        dtype = torch.int32 if is_bits else torch.float32
        return {"out": torch.tensor(rows, dtype=dtype, device=a["ids"].device)}

    tolerance = EXACT if is_bits else {torch.float32: TOLERANCE}
    return KernelCase(name, make, run, reference, tolerance)


def compilations() -> list[Compilation]:
    """The op by itself, over a vocabulary and for some tokens."""
    types = {"seeds_ptr": "*i64", "positions_ptr": "*i64", "out_ptr": "*fp32", "size": "i32"}
    return [
        Compilation(
            name="numbers",
            kernel=_exponential_noise_kernel,
            signature=types,
            constants={"BLOCK": _BLOCK, "ids_ptr": None},
            divisible_by_16=("out_ptr", "size"),
            limits=Limits(max_registers=48),
            required=(r"STG\.E\.128",),
        ),
        Compilation(
            name="numbers-of-ids",
            kernel=_exponential_noise_kernel,
            signature=types | {"ids_ptr": "*i32"},
            constants={"BLOCK": _BLOCK},
            divisible_by_16=("ids_ptr", "out_ptr", "size"),
            limits=Limits(max_registers=80),
            required=(r"LDG\.E\.128", r"STG\.E\.128"),
        ),
    ]
