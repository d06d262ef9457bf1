"""Experts of gpt-oss as llama.cpp's conversion writes them: gate and up apart."""

from collections.abc import Callable, Iterator

import torch

Encoded = tuple[int, bytes, torch.Tensor]
"""As in gguf.py."""
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(weight: torch.Tensor) -> Encoded:
    """Blocks of 32 numbers with a power of two."""
    blocks = weight.float().reshape(-1, 32)
    power = (blocks.abs().amax(-1, keepdim=True) / 6).clamp_min(1e-30).log2().ceil()
    scaled = blocks / power.exp2()
    nearest = (scaled.abs()[..., None] - VALUES).abs().argmin(-1)
    codes = (nearest | ((scaled < 0).long() << 3)).to(torch.uint8)
    content = torch.cat(((power + 127).to(torch.uint8), codes[:, :16] | (codes[:, 16:] << 4)), -1)
    stands_for = VALUES[nearest] * scaled.sign() * power.exp2()
    return 39, content.numpy().tobytes(), stands_for.view(weight.shape)


def apart(
    name: str, weight: torch.Tensor, encode: Callable[[str, torch.Tensor], Encoded]
) -> tuple[dict[str, tuple[torch.Size, Encoded]], torch.Tensor]:
    """Tensors of a file by name, and what they stand for, of one in a checkpoint."""
    layer, own = name.split(".")[2], name.rpartition(".")[2]
    leaf = "bias" if own.endswith("_bias") else "weight"
    rows = weight if leaf == "bias" else weight.transpose(-1, -2)
    stored, stands_for = {}, torch.empty_like(rows, dtype=torch.float32)
    for part, turn in turns(own):
        mine = rows[:, turn].contiguous()
        # biases are never rounded
        as_is = (0, mine.float().numpy().tobytes(), mine.float())
        encoded = as_is if leaf == "bias" else encode(name, mine)
        stands_for[:, turn] = encoded[2].view(mine.shape)
        stored[f"blk.{layer}.ffn_{part}_exps.{leaf}"] = (mine.shape, encoded)
    return stored, stands_for if leaf == "bias" else stands_for.transpose(-1, -2).contiguous()


def turns(own: str) -> Iterator[tuple[str, slice]]:
    """Yield each part and the rows of a tensor that are its own."""
    if own.startswith("down"):
        yield "down", slice(None)
    else:
        yield "gate", slice(0, None, 2)
        yield "up", slice(1, None, 2)
