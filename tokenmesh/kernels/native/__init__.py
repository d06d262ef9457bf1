"""C kernels for the CPU: linear layers, norms, experts, states of mixers, whole forward passes in
one call, noise of draws, copies of KV blocks.

For x86-64 with AVX-512 BF16 or AVX2 under Linux, compiled at first use; `start` says whether they
are there. Every number they compute depends on its own inputs alone: not on the number of tokens,
the batch, the chunk of a prompt, or the threads.
"""

from tokenmesh.kernels.native.coded_experts import CodedExperts
from tokenmesh.kernels.native.codes import NativeCodes
from tokenmesh.kernels.native.elementwise import native_norm, native_silu_mul
from tokenmesh.kernels.native.experts import AnyExperts, Gate, NativeExperts, native_experts
from tokenmesh.kernels.native.noise import native_noise
from tokenmesh.kernels.native.paged import PagedAttention, fits_pages
from tokenmesh.kernels.native.program import Program, ProgramInputs, RopeTurns, Sums
from tokenmesh.kernels.native.routed import Routed, RoutedTokens
from tokenmesh.kernels.native.rows import (
    fits_rows,
    native_gelu,
    native_layer_norm,
    native_row_attention,
)
from tokenmesh.kernels.native.shorts import NativeShorts
from tokenmesh.kernels.native.start import has_started, start
from tokenmesh.kernels.native.states import native_conv, native_delta, native_scan
from tokenmesh.kernels.native.structs import (
    MAX_HEAD_DIM,
    MAX_QUERIES,
    PAGE_TYPES,
    Kind,
    Op,
    ProgramModel,
)
from tokenmesh.kernels.native.weight import NativeWeight, native_linear

__all__ = [
    "MAX_HEAD_DIM",
    "MAX_QUERIES",
    "PAGE_TYPES",
    "AnyExperts",
    "CodedExperts",
    "Gate",
    "Kind",
    "NativeCodes",
    "NativeExperts",
    "NativeShorts",
    "NativeWeight",
    "Op",
    "PagedAttention",
    "Program",
    "ProgramInputs",
    "ProgramModel",
    "RopeTurns",
    "Routed",
    "RoutedTokens",
    "Sums",
    "fits_pages",
    "fits_rows",
    "has_started",
    "native_conv",
    "native_delta",
    "native_experts",
    "native_gelu",
    "native_layer_norm",
    "native_linear",
    "native_noise",
    "native_norm",
    "native_row_attention",
    "native_scan",
    "native_silu_mul",
    "start",
]
