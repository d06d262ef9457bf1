"""Products of the tokens of a chunk: who meets whom, and by how much it has decayed meanwhile."""

import torch


def decayed_products(left: torch.Tensor, key: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """left_i . key_j times the decay from token j to token i, and 0 for j > i.

    left [m, heads, n, Dk], key [heads, n, Dk] -> [m, heads, n, n]. decay [heads, n, 1 or Dk], best
    in float64, is the logarithm of all decays up to a token: it falls from token to token.
    """
    if decay.shape[2] == 1:
        between = (decay - decay.mT).float().tril_().exp_().tril_()
        return (left @ key.mT) * between
    return _channel_products(left, key, decay)


def _channel_products(left: torch.Tensor, key: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """With a decay of each channel, exp(decay_i - decay_j) cannot be factored out.

    It is split at a token between j and i, so that both parts are at most 1. Level by level: the
    later half of each 2 * size tokens meets the earlier half, split where the later one begins.
    """
    count = key.shape[1]
    size = 1 << (count - 1).bit_length()
    pad = (0, 0, 0, size - count)
    left, key = torch.nn.functional.pad(left, pad), torch.nn.functional.pad(key, pad)
    decay = torch.cat([decay, decay[:, -1:].expand(-1, size - count, -1)], dim=1)
    out = left.new_zeros(*left.shape[:3], size)
    out.diagonal(dim1=-2, dim2=-1).copy_((left * key).sum(-1))
    while size > 1:
        half = size // 2
        halves = (-1, 2, half)
        late, early = left.unflatten(-2, halves), key.unflatten(-2, halves)
        falls = decay.unflatten(-2, halves)
        border = falls[..., 1, :1, :]
        late = late[..., 1, :, :] * (falls[..., 1, :, :] - border).float().exp()
        early = early[..., 0, :, :] * (border - falls[..., 0, :, :]).float().exp()
        blocks = diagonal_blocks(out, size)
        blocks[..., half:, :half] = late @ early.mT
        size = half
    return out[..., :count, :count]


def unit_lower_inverse(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of 1 + the part of matrix [heads, n, n] below its diagonal.

    Blocks of 1, then of 2, 4, ... tokens: as exact as solving row by row, in few products.
    """
    count = matrix.shape[-1]
    full = 1 << (count - 1).bit_length()
    pad = full - count
    matrix = torch.nn.functional.pad(matrix, (0, pad, 0, pad))
    out = torch.eye(full).expand_as(matrix).contiguous()
    half = 1
    while half < full:
        blocks = diagonal_blocks(out, 2 * half)
        below = diagonal_blocks(matrix, 2 * half)[..., half:, :half]
        early, late = blocks[..., :half, :half], blocks[..., half:, half:]
        blocks[..., half:, :half] = -(late @ below @ early)
        half *= 2
    return out[..., :count, :count]


def diagonal_blocks(square: torch.Tensor, size: int) -> torch.Tensor:
    """[..., n, n] -> [..., n / size, size, size]: a view of the blocks on the diagonal."""
    count = square.shape[-1] // size
    tiles = square.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    blocks: torch.Tensor = tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return blocks
