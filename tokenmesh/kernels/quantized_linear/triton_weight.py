"""A tile of a weight, decoded in registers from the codes of a DeviceCodes."""

import triton
import triton.language as tl


@triton.jit
def decoded(
    numbers,  # [1, N] pointers to the first code of each output's row
    scales,  # [1, N] pointers to the scale of its first group
    offsets,  # the same, when HAS_OFFSETS
    table_ptr,  # [16] float32 or None
    start,  # the first input of the chunk
    mask_n,  # [1, N]
    outputs,
    inputs,
    shift,
    HALF: tl.constexpr,  # of a chunk of narrow codes: 0 or 1
    SIZE: tl.constexpr,  # inputs
    IS_NARROW: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a scale; 0: all
):
    """float32 [SIZE, N]: the weights of inputs start + HALF * SIZE and on."""
    within = tl.arange(0, SIZE)[:, None]
    first = start + HALF * SIZE
    mask = mask_n & (first + within < inputs)
    if IS_NARROW:
        # rows are padded to whole chunks
        byte = tl.load(numbers + start // 2 + within, mask=mask_n, other=0).to(tl.int32)
        code = (byte >> (4 * HALF)) & 15
        if table_ptr is not None:
            values = tl.load(table_ptr + code)
        else:
            values = code.to(tl.float32) + shift
    else:
        values = tl.load(numbers + first + within, mask=mask, other=0.0)
        if values.dtype == tl.uint8:
            # E4M3 has the bits of float16 in fewer, and an exponent that is 8 smaller
            bits = values.to(tl.int32)
            half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.int16)
            values = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        values = values.to(tl.float32) + shift
    if GROUP == 0:
        group = tl.zeros([1, 1], tl.int32)
        is_scaled = mask_n
    elif GROUP % SIZE == 0:
        only = tl.zeros([1, 1], tl.int32) + first
        group = only // GROUP
        is_scaled = mask_n & (only < inputs)
    else:
        group = (first + within) // GROUP
        is_scaled = mask
    scale = tl.load(scales + group * outputs, mask=is_scaled, other=0.0)
    values = values * scale.to(tl.float32)
    if HAS_OFFSETS:
        offset = tl.load(offsets + group * outputs, mask=is_scaled, other=0.0)
        values = values + offset.to(tl.float32)
    return values
