"""exponential_noise on a GPU: functions that other kernels inline, and the op by itself.

The hash is equal to the CPU's bit for bit, and so is the uniform number made of it. The logarithm
is not: each library rounds its own, so the last two bits of the result may differ.
"""

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.exponential_noise.cpu import token_keys
from tokenmesh.kernels.exponential_noise.reference import (
    exponential_noise_reference,
    noise_bits_reference,
)
from tokenmesh.kernels.exponential_noise.tolerance import TOLERANCE
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.specimen import EXACT, Compilation, Inputs, Limits, Outputs, Specimen

_BLOCK = 1024


def exponential_noise(
    seeds: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """seeds, positions [R] int64, keys [n] or [R, n] int32 -> [R, n] float32."""
    return _launch(seeds, positions, keys, torch.float32)


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The 31 random bits behind each number: [R, n] int32."""
    return _launch(seeds, positions, keys, torch.int32)


def _launch(
    seeds: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    rows, size = seeds.shape[0], keys.shape[-1]
    out = torch.empty(rows, size, dtype=dtype, device=keys.device)
    if out.numel():
        _exponential_noise_kernel[(rows, triton.cdiv(size, _BLOCK))](
            seeds,
            positions,
            keys.contiguous(),
            out,
            keys.stride(0) if keys.dim() == 2 else 0,
            size,
            BLOCK=_BLOCK,
            **FUSED,
        )
    return out


@triton.jit
def _splitmix64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def stream_keys(seed, position):
    """seed, position int64 -> the two uint32 keys of one draw."""
    seed = seed.to(tl.uint64, bitcast=True)
    position = position.to(tl.int64).to(tl.uint64, bitcast=True)
    key = _splitmix64(_splitmix64(seed) ^ position)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def token_key(token_ids):
    """int32 -> uint32; what `token_keys` computes."""
    x = token_ids.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_bits(low, high, key):
    """Keys of the draw and of the token, uint32 -> 31 bits, int32."""
    bits = (key ^ low) * 0x7FEB352D
    bits = ((bits ^ (bits >> 16)) + high) * 0x846CA68B
    bits = (bits ^ (bits >> 15)) & 0x7FFFFFFF
    return bits.to(tl.int32, bitcast=True)


@triton.jit
def exponential_of(bits):
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
def exponential(low, high, token_ids):
    """The number of each token id, int32 -> float32."""
    return exponential_of(random_bits(low, high, token_key(token_ids)))


@triton.jit
def _exponential_noise_kernel(
    seeds_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    keys_ptr,  # [R, size] or [size] int32
    out_ptr,  # [R, size] float32, or int32 for the bits
    stride_keys,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    low, high = stream_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    keys = tl.load(keys_ptr + row * stride_keys + offs, mask=mask, other=0)
    bits = random_bits(low, high, keys.to(tl.uint32, bitcast=True))
    if out_ptr.dtype.element_ty == tl.int32:
        tl.store(out_ptr + row * size + offs, bits, mask=mask)
    else:
        tl.store(out_ptr + row * size + offs, exponential_of(bits), mask=mask)


def specimens() -> list[Specimen]:
    """Seeds and positions at the ends of their ranges, shared and own keys, an odd size."""
    return [
        _specimen("bits", is_bits=True, own_keys=False),
        _specimen("numbers", is_bits=False, own_keys=False),
        _specimen("numbers-own-keys", is_bits=False, own_keys=True),
    ]


def _specimen(name: str, is_bits: bool, own_keys: bool) -> Specimen:
    def make(_: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        seeds = [0, 1, -5, 2**62 + 3, -(2**63)]
        ids = torch.randint(0, 2**31 - 1, (1027,), generator=generator, device=device)
        ids[:4] = torch.tensor([0, 1, 151935, 2**31 - 1])
        keys = token_keys(ids.int())
        return {
            "seeds": torch.tensor(seeds, device=device),
            "positions": torch.tensor([0, 1, 2, 131071, 2**40], device=device),
            "ids": ids,
            "keys": keys.repeat(len(seeds), 1) if own_keys else keys,
        }

    def run(a: Inputs) -> Outputs:
        op = noise_bits if is_bits else exponential_noise
        return {"out": op(a["seeds"], a["positions"], a["keys"])}

    def reference(a: Inputs) -> Outputs:
        one = noise_bits_reference if is_bits else exponential_noise_reference
        rows = [
            [one(seed, position, token) for token in a["ids"].tolist()]
            for seed, position in zip(a["seeds"].tolist(), a["positions"].tolist(), strict=True)
        ]
        dtype = torch.int32 if is_bits else torch.float32
        return {"out": torch.tensor(rows, dtype=dtype, device=a["ids"].device)}

    tolerance = EXACT if is_bits else {torch.float32: TOLERANCE}
    return Specimen(name, make, run, reference, tolerance)


def compilations() -> list[Compilation]:
    """The op by itself."""
    return [
        Compilation(
            name="numbers",
            kernel=_exponential_noise_kernel,
            signature={
                "seeds_ptr": "*i64",
                "positions_ptr": "*i64",
                "keys_ptr": "*i32",
                "out_ptr": "*fp32",
                "stride_keys": "i32",
                "size": "i32",
            },
            constants={"BLOCK": _BLOCK},
            divisible_by_16=("keys_ptr", "out_ptr", "stride_keys", "size"),
            limits=Limits(max_registers=48),
            required=(r"LDG\.E\.128", r"STG\.E\.128"),
        )
    ]
