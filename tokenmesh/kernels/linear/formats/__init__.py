"""Reads quantized weights: the form of their tensors, and the numbers that they stand for.

A format is given a module's tensors and makes the weight of them in float32. That is the
specification of every kernel that computes in a format, and what is loaded where there is none.
"""

from tokenmesh.kernels.codes import Codes, merged
from tokenmesh.kernels.linear.formats.awq import Awq
from tokenmesh.kernels.linear.formats.bitsandbytes import Bnb4, Bnb8
from tokenmesh.kernels.linear.formats.fp4 import MXFP4_GROUP, NVFP4_GROUP, Fp4
from tokenmesh.kernels.linear.formats.gptq import Gptq
from tokenmesh.kernels.linear.formats.mxfp4 import Mxfp4Experts
from tokenmesh.kernels.linear.formats.packed import Packed
from tokenmesh.kernels.linear.formats.parts import Format, FormatError, Part
from tokenmesh.kernels.linear.formats.scaled import E8M0, WHOLE, Scaled

__all__ = [
    "E8M0",
    "MXFP4_GROUP",
    "NVFP4_GROUP",
    "WHOLE",
    "Awq",
    "Bnb4",
    "Bnb8",
    "Codes",
    "Format",
    "FormatError",
    "Fp4",
    "Gptq",
    "Mxfp4Experts",
    "Packed",
    "Part",
    "Scaled",
    "merged",
]
