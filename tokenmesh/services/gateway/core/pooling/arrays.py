"""Arithmetic on the numbers of answers. Import it in a thread: numpy takes 0.1 s and 15 MB."""

from typing import Any, Final

import numpy

from tokenmesh.shared.messages.pooling import Pooled

Array = numpy.ndarray[Any, numpy.dtype[Any]]

_INT8_SCALE: Final = 127.0
_FP8: Final[dict[str, tuple[int, int, int]]] = {"fp8_e4m3": (4, 3, 7), "fp8_e5m2": (5, 2, 15)}
"""Bits of exponent and mantissa, and the exponent's bias."""


def array_of(pooled: Pooled) -> Array:
    """The numbers as float32, in their shape; they share the memory of `data`."""
    return numpy.frombuffer(pooled.data, dtype="<f4").reshape(pooled.shape)


def to_bytes(pooled: Pooled, dtype: str, *, is_big_endian: bool) -> bytes:
    """The numbers as bytes of a type, rounded to the nearest even; row by row."""
    values = array_of(pooled)
    order = ">" if is_big_endian else "<"
    match dtype:
        case "float32":
            return values.astype(f"{order}f4").tobytes()
        case "float16":
            with numpy.errstate(over="ignore"):
                return values.astype(f"{order}f2").tobytes()
        case "bfloat16":
            bits = values.view(numpy.uint32).astype(numpy.uint64)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return rounded.astype(f"{order}u2").tobytes()
        case _:
            return _to_fp8(values, dtype).tobytes()


def _to_fp8(values: Array, dtype: str) -> Array:
    """8-bit floats; what is too large becomes the largest number of e4m3, and infinity in e5m2."""
    exponent_bits, mantissa_bits, bias = _FP8[dtype]
    has_infinity = exponent_bits == 5
    every = numpy.arange(128)
    exponent, mantissa = every >> mantissa_bits, every & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    normal = (1.0 + fraction) * numpy.exp2(exponent - bias)
    table = numpy.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)
    # Codes above the largest finite number: infinity and NaN, or one NaN.
    table = table[: 0x7C if has_infinity else 0x7F]
    step = table[-1] - table[-2]
    borders = numpy.append((table[1:] + table[:-1]) / 2, table[-1] + step / 2)
    sizes = numpy.abs(values).astype(numpy.float64)
    found = numpy.searchsorted(borders, sizes, side="left")
    if not has_infinity:
        found = numpy.minimum(found, len(table) - 1)
    is_tie = borders[numpy.minimum(found, len(borders) - 1)] == sizes
    found = found + (is_tie & (found % 2 == 1))
    signs = numpy.signbit(values).astype(numpy.uint8) << 7
    codes: Array = found.astype(numpy.uint8) | signs
    return codes


def quantized(pooled: Pooled, kind: str) -> list[int]:
    """An embedding as small integers: of [-1, 1] in 255 steps, or the signs, eight to a byte."""
    values = array_of(pooled)
    if kind in ("binary", "ubinary"):
        packed = numpy.packbits(values >= 0)
        return (packed if kind == "ubinary" else packed.astype(numpy.int16) - 128).tolist()
    steps = numpy.clip(numpy.rint(values * _INT8_SCALE), -128, 127).astype(numpy.int16)
    return (steps + 128 if kind == "uint8" else steps).tolist()  # type: ignore[no-any-return]


def mean(parts: list[Pooled], weights: list[int], *, normalizes: bool) -> Pooled:
    """The weighted mean of embeddings, of length 1 where theirs are and `normalizes` is set."""
    if len(parts) == 1:
        return parts[0]
    rows = numpy.stack([array_of(each) for each in parts]).astype(numpy.float64)
    found = numpy.average(rows, axis=0, weights=weights)
    lengths, size = numpy.linalg.norm(rows, axis=1), numpy.linalg.norm(found)
    # bfloat16 rounds a length of 1
    if normalizes and size > 0 and numpy.allclose(lengths, 1.0, rtol=1e-2, atol=1e-5):
        found = found / size
    return Pooled(parts[0].shape, found.astype("<f4").tobytes())


def cosines(first: Pooled, seconds: list[Pooled]) -> list[float]:
    """The cosine similarity of an embedding with others; 0 where one of them is 0."""
    one = array_of(first).astype(numpy.float64)
    others = numpy.stack([array_of(each) for each in seconds]).astype(numpy.float64)
    sizes = numpy.linalg.norm(others, axis=1) * numpy.linalg.norm(one)
    products = others @ one
    return numpy.divide(products, sizes, out=numpy.zeros_like(products), where=sizes > 0).tolist()  # type: ignore[no-any-return]


def max_sims(query: Pooled, documents: list[Pooled]) -> list[float]:
    """Late interaction: for each token of the query its best product with a document's token."""
    one = array_of(query)
    return [float((one @ array_of(each).T).max(axis=1).sum(dtype="f8")) for each in documents]
