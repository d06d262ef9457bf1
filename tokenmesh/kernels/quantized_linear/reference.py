"""The specification of quantized_linear, in float64 with one rounding at the end."""

import torch

from tokenmesh.kernels.quantized_linear.device_codes import ROUNDED_GROUP, DeviceCodes


def quantized_linear_reference(
    x: torch.Tensor, codes: DeviceCodes, out_dtype: torch.dtype
) -> torch.Tensor:
    """x [T, I] -> [T, O]."""
    x = x if codes.order is None else x[:, codes.order]
    weight = codes.decoded()
    if codes.multiplies_codes(x.dtype):
        out = rounded_inputs(x, codes.numbers.dtype) @ weight.double().T
    else:
        out = x.double() @ weight.to(x.dtype).double().T
    return (out if codes.bias is None else out + codes.bias.double()).to(out_dtype)


def rounded_inputs(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 [T, I]: x in 8 bits, with a scale for ROUNDED_GROUP inputs of a token."""
    missing = -x.shape[1] % ROUNDED_GROUP
    padded = torch.nn.functional.pad(x, (0, missing)).float()
    groups = padded.view(len(x), padded.shape[1] // ROUNDED_GROUP, ROUNDED_GROUP)
    limit = torch.finfo(dtype).max if dtype.is_floating_point else 127.0
    scales = groups.abs().amax(-1, keepdim=True) / limit
    numbers = groups / torch.where(scales > 0, scales, 1.0)
    numbers = numbers.to(dtype).float() if dtype.is_floating_point else (numbers + 0.5).floor()
    return (numbers.double() * scales).flatten(1)[:, : x.shape[1]]
