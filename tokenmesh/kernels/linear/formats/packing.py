"""Integers of 2 to 8 bits in words of 32, and scales that several of them share."""

from collections.abc import Sequence

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.parts import FormatError

WORD_BITS = 32


def unpack_words(
    words: torch.Tensor, bits: int, count: int | None = None, places: Sequence[int] | None = None
) -> torch.Tensor:
    """words int32 [..., W] -> uint8 [..., count]: a stream of bits, the lowest first.

    count: None for all of them. places: where in a word the first, second, ... number lies. Where
    `bits` does not divide 32, numbers cross words (3 bits: 32 in 3 words).
    """
    mask = (1 << bits) - 1
    if WORD_BITS % bits == 0:
        in_word = range(WORD_BITS // bits) if places is None else places
        shifts = [bits * place for place in in_word]
        numbers = torch.stack([((words >> shift) & mask).to(torch.uint8) for shift in shifts], -1)
        return numbers.flatten(-2)[..., :count]
    total = words.shape[-1] * WORD_BITS // bits
    first = torch.arange(total if count is None else count) * bits
    low, shift = first // WORD_BITS, first % WORD_BITS
    high = (low + 1).clamp_max(words.shape[-1] - 1)
    stream = words.long() & 0xFFFFFFFF
    # past the last word nothing is left to cross into, so what lies there does not matter
    pairs = stream[..., low] | (stream[..., high] << WORD_BITS)
    return ((pairs >> shift) & mask).to(torch.uint8)


def by_group(
    numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor | None
) -> torch.Tensor:
    """(numbers - zeros) * scales: uint8 [O, I], two of [O, G] or [1, G] -> float32 [O, I].

    group: of each input, [I]; None: groups of the same size, in their order.
    """
    if group is not None:
        zeros, scales = zeros[:, group], scales[:, group]
    products = numbers.float().view(len(numbers), scales.shape[1], -1)
    products.sub_(zeros[..., None]).mul_(scales[..., None])
    return products.view(numbers.shape)


def codes_by_group(
    numbers: torch.Tensor,
    bits: int,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    group: torch.Tensor | None,
) -> Codes | None:
    """As `by_group`, of numbers of some bits. None where groups are not of one size."""
    outputs, inputs = numbers.shape
    num_groups = scales.shape[1]
    size = inputs // num_groups
    order = None
    if group is not None:
        if bool((torch.bincount(group, minlength=num_groups) != size).any()):
            return None
        order = group.argsort(stable=True)
        numbers = numbers[:, order]
    center = 1 << (bits - 1)
    scales = scales.expand(outputs, num_groups)
    offsets = (center - zeros.expand(outputs, num_groups)) * scales
    return Codes(
        numbers,
        bits=4 if bits <= 4 else 8,
        scales=scales,
        group_size=size,
        offsets=offsets if bool(offsets.any()) else None,
        center=center,
        order=order,
    )


def ordered_group(
    given: torch.Tensor | None, inputs: int, groups: int, has_order: bool, part: str
) -> torch.Tensor | None:
    """Each input's group, or None where they are in order. Raises FormatError for bad ones.

    has_order: they may be in any order.
    """
    if given is None:
        return None
    given = given.long()
    if torch.equal(given, torch.arange(inputs) // (inputs // groups)):
        return None
    if not has_order:
        raise FormatError(part, "is not in order, which the configuration does not say")
    if int(given.min()) < 0 or int(given.max()) >= groups:
        raise FormatError(part, f"has groups that are not within the {groups} of scales")
    return given


def spread(scales: torch.Tensor, tile: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """scales [ceil(O / rows), ceil(I / columns)], tile (rows, columns) -> [O, I]."""
    for dim, size in enumerate(tile):
        if scales.shape[dim] != 1:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scales.expand(*shape)
