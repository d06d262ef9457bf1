"""The structs of program.h as ctypes sees them."""

import ctypes
from enum import IntEnum
from typing import Final

import torch

MAX_HEAD_DIM: Final = 256
MAX_QUERIES: Final = 32
"""Query heads of one kv head, times the tokens of a tile."""
PAGE_TYPES: Final = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
"""Numbers of the types of 8-bit pages; 0: pages have the model's type."""

_I = ctypes.c_int64
_P = ctypes.c_void_p


class Kind(IntEnum):
    """The kinds of operations."""

    NORM = 0
    LINEAR = 1
    HEAD_NORM = 2
    ROPE = 3
    KV_WRITE = 4
    ATTENTION = 5
    SILU_MUL = 6
    ADD = 7
    SCALE = 8
    GELU_MUL = 9
    GELU_TANH_MUL = 10
    EXPERTS = 11
    TOKEN_GATE = 12
    """Every number of a token times the sigmoid of the source's one."""
    LORA = 13
    QUANTIZED = 14
    """A linear layer whose weight is codes."""


class Op(ctypes.Structure):
    _fields_ = (
        ("kind", _I),
        ("source", _I),
        ("target", _I),
        ("width", _I),
        ("outputs", _I),
        ("offset", _I),
        ("target_offset", _I),
        ("index", _I),
        ("group", _I),
        ("layer", _I),
        ("window", _I),
        ("value", ctypes.c_float),
        ("weight", _P),
        ("bias", _P),
        ("softcap", ctypes.c_float),
    )


class ProgramModel(ctypes.Structure):
    _fields_ = (
        ("is_bf16", _I),
        ("heads", _I),
        ("kv_heads", _I),
        ("head_dim", _I),
    )


class StepArguments(ctypes.Structure):
    _fields_ = (
        ("tokens", _I),
        ("buffers", _P),
        ("widths", _P),
        ("turns", _P),
        ("turns_by_position", _P),
        ("pairs", _P),
        ("pages", _P),
        ("blocks", _I),
        ("page_size", _I),
        ("page_type", _I),
        ("page_scales", _P),
        ("tables", _P),
        ("columns", _I),
        ("rows", _P),
        ("positions", _P),
        ("scales", _P),
        ("tiles", _P),
        ("tile_count", _I),
        ("scratch", _P),
        ("adapters", _P),
    )
