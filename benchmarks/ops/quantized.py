"""Work of weights that stay codes: an MLP's wide projection and experts, in groups of 32."""

import torch

from benchmarks.ops.batch import Batch
from benchmarks.ops.linear import has_native
from benchmarks.ops.moe import experts_work
from benchmarks.ops.work import Dimensions, Work, size_of
from tokenmesh.kernels.linear import linear, pack_codes
from tokenmesh.kernels.linear.formats.round import rounded
from tokenmesh.kernels.quantized_linear import TOLERANCE


def quantized_linear_work(
    batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device
) -> Work:
    """x [tokens, hidden] by the gate and up weights in one; torch's way has plain weights."""
    x = torch.randn(batch.num_tokens, sizes.hidden, device=device).to(dtype)
    weight = torch.randn(2 * sizes.intermediate, sizes.hidden, device=device)
    codes = rounded(weight.mul_(sizes.hidden**-0.5), "int4")
    plain = codes.decoded().to(dtype)
    layer = pack_codes(codes, None, dtype, has_native(device))
    outputs = batch.num_tokens * weight.shape[0]
    return Work(
        run=lambda: linear(x, layer),
        reference=lambda: (x.double() @ plain.double().T).to(dtype),
        torch_way=lambda: torch.nn.functional.linear(x, plain),
        # half a byte and its part of a scale
        num_bytes=weight.numel() * 5 // 8 + size_of(x) + outputs * x.element_size(),
        num_flops=2 * outputs * sizes.hidden,
        tolerance=TOLERANCE[dtype],
    )


def moe_int4_work(
    batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device
) -> Work:
    """As `moe_work`; torch's way has plain weights."""
    return experts_work(batch, sizes, dtype, device, "int4")
