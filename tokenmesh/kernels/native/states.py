"""One token of each row through the state of a mixer, in C: see states.h."""

import ctypes
from collections.abc import Mapping
from typing import Any, Final

import torch

from tokenmesh.kernels.native.start import library

MAX_KEY: Final = 256
"""Key channels of a head."""
MAX_KEPT: Final = 8
"""Inputs that a channel of a convolution keeps, and its weights."""

_DTYPES: Final = (torch.float32, torch.bfloat16)
_I = ctypes.c_int64
_P = ctypes.c_void_p
_F = ctypes.c_float


def _fields(pointers: str, numbers: str, floats: str) -> tuple[tuple[str, Any], ...]:
    kinds = ((pointers, _P), (numbers, _I), (floats, _F))
    return tuple((name, kind) for names, kind in kinds for name in names.split())


class _Delta(ctypes.Structure):
    _fields_ = _fields(
        "q k v g beta state out tokens slots",
        "rows is_bf16 key_heads heads key_dim value_dim has_channels is_normed"
        " q_token q_head k_token k_head v_token v_head",
        "scale",
    )


class _Scan(ctypes.Structure):
    _fields_ = _fields(
        "x B C z dt rate D dt_bias state out tokens slots",
        "rows is_bf16 heads groups dim size"
        " x_token x_head B_token B_group C_token C_group z_token z_head",
        "dt_least dt_most",
    )


class _Conv(ctypes.Structure):
    _fields_ = _fields(
        "x weight bias state out tokens slots",
        "rows is_bf16 channels width kept x_token is_silu",
        "",
    )


def fits(state: torch.Tensor, *tensors: torch.Tensor | None) -> bool:
    """Return whether the kernels know the tensors: one dtype, and a state without gaps."""
    kinds = {each.dtype for each in tensors if each is not None}
    return len(kinds) == 1 and kinds.pop() in _DTYPES and state.is_contiguous()


def native_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    is_normed: bool,
) -> None:
    """See kernels/gated_delta. tokens, slots [R] int64: of the rows that have one token.

    Writes the rows' states and their tokens of out [T, Hv, Dv], contiguous.
    """
    q, k, v = _straight(q), _straight(k), _straight(v)
    tensors = {
        **{"q": q, "k": k, "v": v, "state": state, "out": out, "tokens": tokens, "slots": slots},
        **{"g": g.float().contiguous(), "beta": beta.float().contiguous()},
    }
    op = _Delta(
        **_pointers(tensors),
        rows=len(tokens),
        is_bf16=out.dtype == torch.bfloat16,
        key_heads=k.shape[1],
        heads=v.shape[1],
        key_dim=k.shape[2],
        value_dim=v.shape[2],
        has_channels=g.ndim == 3,
        is_normed=is_normed,
        **_strides(("q_token", "q_head"), q),
        **_strides(("k_token", "k_head"), k),
        **_strides(("v_token", "v_head"), v),
        scale=scale,
    )
    library().tm_delta_step(ctypes.byref(op))


def native_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_limit: tuple[float, float],
) -> None:
    """See kernels/mamba2 and `native_delta`; out [T, H, P]."""
    x, B, C = _straight(x), _straight(B), _straight(C)
    z = None if z is None else _straight(z)
    tensors = {
        **{"x": x, "B": B, "C": C, "z": z, "state": state, "out": out},
        **{"tokens": tokens, "slots": slots, "dt": _float(dt), "rate": _float(A)},
        **{"D": _float(D), "dt_bias": _float(dt_bias)},
    }
    op = _Scan(
        **_pointers(tensors),
        rows=len(tokens),
        is_bf16=out.dtype == torch.bfloat16,
        heads=x.shape[1],
        groups=B.shape[1],
        dim=x.shape[2],
        size=B.shape[2],
        **_strides(("x_token", "x_head"), x),
        **_strides(("B_token", "B_group"), B),
        **_strides(("C_token", "C_group"), C),
        **_strides(("z_token", "z_head"), x if z is None else z),
        dt_least=dt_limit[0],
        dt_most=dt_limit[1],
    )
    library().tm_scan_step(ctypes.byref(op))


def native_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    is_silu: bool,
) -> None:
    """See kernels/causal_conv and `native_delta`; out [T, C]. 1 to MAX_KEPT inputs are kept."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tensors = {
        **{"x": x, "weight": weight.contiguous(), "bias": bias, "state": state, "out": out},
        **{"tokens": tokens, "slots": slots},
    }
    op = _Conv(
        **_pointers(tensors),
        rows=len(tokens),
        is_bf16=out.dtype == torch.bfloat16,
        channels=weight.shape[0],
        width=weight.shape[1],
        kept=state.shape[2],
        x_token=x.stride(0),
        is_silu=is_silu,
    )
    library().tm_conv_step(ctypes.byref(op))


def _straight(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with the numbers of a head side by side."""
    return x if x.stride(2) == 1 else x.contiguous()


def _float(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float().contiguous()


def _pointers(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, int | None]:
    """The caller holds the tensors until the kernel has ended."""
    return {name: None if each is None else each.data_ptr() for name, each in tensors.items()}


def _strides(names: tuple[str, str], x: torch.Tensor) -> dict[str, int]:
    return dict(zip(names, x.stride()[:2], strict=True))
