"""Tiny quantized checkpoints, written from what is published of each format.

Each writer makes the stored tensors of one weight [O, I] and the numbers that they stand for; it
shares no code with the reader. Numbers are put into their places one input or output at a time.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""Tensors by their names in the module, and float32 [O, I]."""

PROJECTIONS: Final = ("_proj", ".w1", ".w2", ".w3")
"""Endings of the names of the modules that are quantized."""
GROUP: Final = 16
BLOCK: Final = (24, 40)
"""Rows and columns: neither divides every weight."""
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format as a checkpoint has it."""

    config: Mapping[str, Any]
    write: Callable[[torch.Tensor], Written]
    file: str = "config.json"
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of other modules."""


def write_checkpoint(source: Path, quantized: Path, plain: Path, scheme: Scheme) -> None:
    """Quantize all projections of a checkpoint; `plain`: the same with what they stand for."""
    tensors = load_file(source / "model.safetensors")
    stored: Tensors = dict(scheme.more)
    for name, weight in list(tensors.items()):
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or not module.endswith(PROJECTIONS):
            stored[name] = weight
            continue
        parts, tensors[name] = scheme.write(weight)
        stored |= {f"{module}.{each}": part.contiguous() for each, part in parts.items()}
    raw = json.loads((source / "config.json").read_text())
    for directory, content in ((quantized, stored), (plain, tensors)):
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(raw))
        save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
    if scheme.file == "config.json":
        edited = {**raw, "quantization_config": dict(scheme.config)}
        (quantized / "config.json").write_text(json.dumps(edited))
    else:
        (quantized / scheme.file).write_text(json.dumps({"quantization": dict(scheme.config)}))


def shard(directory: Path, count: int) -> None:
    """Split the tensors over files, so that the parts of a weight lie in several."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        names = sorted(tensors)[number::count]
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)


def tiles(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The largest absolute number of each tile, spread over its numbers."""
    spread = torch.empty_like(weight)
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            tile = (slice(top, top + rows), slice(left, left + columns))
            spread[tile] = weight[tile].abs().max()
    return spread


def to_int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def stream(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, count] -> int32 [N, words]: one number after the other, from the lowest bits on."""
    words = torch.zeros((len(numbers), -(-numbers.shape[1] * bits // 32)), dtype=torch.int64)
    # Bits of different numbers never meet: their sum in a word is their union.
    at = bits * torch.arange(numbers.shape[1])
    for bit in range(bits):
        set_bits = ((numbers.to(torch.int64) >> bit) & 1) << ((at + bit) % 32)
        words.index_add_(1, (at + bit) // 32, set_bits)
    return to_int32(words)


def write_fp8(rows: int, columns: int, scale: str, shape: str = "") -> Callable[..., Written]:
    """One scale for rows x columns (0: all); `shape`: "scalar" or "one" where there is one."""

    def write(weight: torch.Tensor) -> Written:
        high, wide = rows or weight.shape[0], columns or weight.shape[1]
        scales = tiles(weight, high, wide) / 448
        numbers = (weight / scales).to(torch.float8_e4m3fn)
        stored = scales[::high, ::wide]
        stored = {"scalar": stored.reshape(-1)[0], "one": stored.reshape(-1)}.get(shape, stored)
        return {"weight": numbers, scale: stored.clone()}, numbers.float() * scales

    return write


def write_fp8_powers(weight: torch.Tensor) -> Written:
    """Scales of blocks are powers of two, stored as such."""
    exponents = (tiles(weight, *BLOCK) / 448).log2().ceil()
    numbers = (weight / 2**exponents).to(torch.float8_e4m3fn)
    stored = (exponents[:: BLOCK[0], :: BLOCK[1]] + 127).to(torch.uint8)
    parts = {"weight": numbers, "weight_scale_inv": stored.view(torch.float8_e8m0fnu)}
    return parts, numbers.float() * 2**exponents


def write_static_fp8(weight: torch.Tensor) -> Written:
    parts, plain = write_fp8(0, 0, "weight_scale", "scalar")(weight)
    return {**parts, "input_scale": torch.tensor(0.02)}, plain


def write_mxfp8(weight: torch.Tensor) -> Written:
    exponents = (tiles(weight, 1, 32) / 448).log2().ceil()
    numbers = (weight / 2**exponents).to(torch.float8_e4m3fn)
    stored = (exponents[:, ::32] + 127).to(torch.uint8)
    return {"weight": numbers, "weight_scale": stored}, numbers.float() * 2**exponents


def write_int8(weight: torch.Tensor) -> Written:
    scales = tiles(weight, 1, weight.shape[1]) / 127
    numbers = (weight / scales).round()
    parts = {"weight": numbers.to(torch.int8), "weight_scale": scales[:, :1]}
    return parts, numbers * scales


def write_int8_zeros(weight: torch.Tensor) -> Written:
    scales = tiles(weight, 1, weight.shape[1]) / 60
    zeros = (torch.arange(len(weight)) % 11 - 5)[:, None]
    numbers = (weight / scales).round() + zeros
    parts = {"weight": numbers, "weight_zero_point": zeros}
    stored = {name: each.to(torch.int8) for name, each in parts.items()}
    return {**stored, "weight_scale": scales[:, :1]}, (numbers - zeros) * scales


def integers(weight: torch.Tensor, bits: int, group: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Unsigned numbers [O, I], zero points [O, G], float16 scales [O, G]; group: of each input."""
    count, top = int(group.max()) + 1, (1 << bits) - 1
    scales = torch.empty((len(weight), count))
    zeros = torch.empty((len(weight), count), dtype=torch.int64)
    for each in range(count):
        of_group = weight[:, group == each]
        low, high = of_group.min(1).values, of_group.max(1).values
        scales[:, each] = ((high - low) / top).half().float()
        zeros[:, each] = (-low / scales[:, each]).round().clamp(0, top).long()
    numbers = (weight / scales[:, group]).round().long() + zeros[:, group]
    return numbers.clamp(0, top), zeros, scales


def order_of(inputs: int, group_size: int, is_shuffled: bool) -> torch.Tensor:
    """The group of each input."""
    group = torch.arange(inputs) // group_size
    if is_shuffled:
        return group[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
    return group


def write_gptq(
    bits: int, *, lacks: int = 1, is_shuffled: bool = False, group_size: int = GROUP
) -> Callable[..., Written]:
    """`lacks`: what is subtracted from stored zero points."""

    def write(weight: torch.Tensor) -> Written:
        group = order_of(weight.shape[1], group_size, is_shuffled)
        numbers, zeros, scales = integers(weight, bits, group)
        parts = {
            "qweight": stream(numbers, bits).t(),
            "qzeros": stream((zeros.t() - lacks) & ((1 << bits) - 1), bits),
            "scales": scales.t().half(),
            "g_idx": group.int(),
        }
        return parts, (numbers - zeros[:, group]) * scales[:, group]

    return write


def write_awq(weight: torch.Tensor) -> Written:
    group = order_of(weight.shape[1], GROUP, is_shuffled=False)
    numbers, zeros, scales = integers(weight, 4, group)
    parts = {"qweight": awq_words(numbers.t()), "qzeros": awq_words(zeros.t())}
    plain = (numbers - zeros[:, group]) * scales[:, group]
    return {**parts, "scales": scales.t().half()}, plain


def awq_words(numbers: torch.Tensor) -> torch.Tensor:
    """[N, O] -> [N, O / 8]: in a word from below the 0th, 2nd, 4th, 6th, 1st, 3rd, 5th, 7th."""
    words = torch.zeros((len(numbers), numbers.shape[1] // 8), dtype=torch.int64)
    for output in range(0, numbers.shape[1], 8):
        for place, which in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, output // 8] |= numbers[:, output + which] << (4 * place)
    return to_int32(words)


def write_packed(
    bits: int, *, group_size: int = GROUP, has_zeros: bool = False, is_shuffled: bool = False
) -> Callable[..., Written]:
    """group_size 0: one group. Signed numbers, stored with half of their range added."""

    def write(weight: torch.Tensor) -> Written:
        group = order_of(weight.shape[1], group_size or weight.shape[1], is_shuffled)
        numbers, zeros, scales = integers(weight, bits, group)
        parts = {
            "weight_packed": stream(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            parts["weight_zero_point"] = stream(zeros.t(), bits).t()
        else:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        if is_shuffled:
            parts["weight_g_idx"] = group.int()
        return parts, (numbers - zeros[:, group]) * scales[:, group]

    return write


def nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """[O, I] -> uint8 [O, I / 2], the first in the lower bits."""
    return (numbers[:, 0::2] + 16 * numbers[:, 1::2]).to(torch.uint8)


def e2m1(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest numbers, as bits and as floats."""
    values = torch.tensor(E2M1)
    nearest = (weight.abs()[..., None] - values).abs().argmin(-1)
    negative = weight < 0
    return nearest + 8 * negative, values[nearest] * torch.where(negative, -1.0, 1.0)


def write_nvfp4(packed: str, whole: str, is_divided: bool) -> Callable[..., Written]:
    """`whole`: the name of the scale of all groups, and whether others are divided by it."""

    def write(weight: torch.Tensor) -> Written:
        factor = weight.abs().max() / (6 * 448)
        scales = (tiles(weight, 1, 16) / 6 / factor).to(torch.float8_e4m3fn)
        spread = scales.float() * factor
        bits, numbers = e2m1(weight / spread.clamp_min(1e-12))
        parts = {packed: nibbles(bits), "weight_scale": scales[:, ::16]}
        parts[whole] = (1 / factor).reshape(1) if is_divided else factor
        by_parts = scales.float() / (1 / factor) if is_divided else spread
        return parts, numbers * by_parts

    return write


def write_mxfp4(weight: torch.Tensor) -> Written:
    exponents = (tiles(weight, 1, 32) / 6).log2().ceil()
    bits, numbers = e2m1(weight / 2**exponents)
    scales = (exponents[:, ::32] + 127).to(torch.uint8)
    return {"weight_packed": nibbles(bits), "weight_scale": scales}, numbers * 2**exponents


def write_bnb4(is_nested: bool, kind: str = "nf4") -> Callable[..., Written]:
    """Blocks of 64; maxima in blocks of 256 that index a table of 256."""

    def write(weight: torch.Tensor) -> Written:
        table = torch.linspace(-1, 1, 16) ** 3
        flat = weight.flatten()
        maxima = tiles(flat[None], 1, 64)[0, ::64].clone()
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32"}
        state["shape"] = list(weight.shape)
        parts: Tensors = {"weight.absmax": maxima, "weight.quant_map": table}
        if is_nested:
            offset, nested = float(maxima.mean()), torch.linspace(-1, 1, 256)
            blocks = tiles((maxima - offset)[None], 1, 256)[0]
            places = ((maxima - offset) / blocks)[:, None].sub(nested).abs().argmin(-1)
            parts["weight.absmax"] = places.to(torch.uint8)
            parts["weight.nested_absmax"] = blocks[::256].clone()
            parts["weight.nested_quant_map"] = nested
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            maxima = nested[places] * blocks + offset
        spread = maxima.repeat_interleave(64)[: len(flat)]
        places = (flat / spread)[:, None].sub(table).abs().argmin(-1)
        parts["weight"] = (places[0::2] * 16 + places[1::2]).to(torch.uint8)[:, None]
        encoded = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = encoded
        return parts, (table[places] * spread).view_as(weight)

    return write


def write_bnb8(weight: torch.Tensor) -> Written:
    maxima = weight.abs().max(1).values
    numbers = (weight * 127 / maxima[:, None]).round()
    parts = {"weight": numbers.to(torch.int8), "SCB": maxima}
    parts["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return parts, numbers * maxima[:, None] / 127
