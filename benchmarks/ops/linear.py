"""Work of linear: the wide projection of an MLP."""

import torch

from benchmarks.ops.batch import Batch
from benchmarks.ops.work import Dimensions, Work, size_of
from tokenmesh.kernels.linear import TOLERANCE, linear, linear_reference, pack


def linear_work(batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device) -> Work:
    """x [tokens, hidden] by the gate and up weights in one."""
    x = torch.randn(batch.num_tokens, sizes.hidden, device=device).to(dtype)
    weight = torch.randn(2 * sizes.intermediate, sizes.hidden, device=device)
    weight = weight.mul_(sizes.hidden**-0.5).to(dtype)
    layer = pack(weight.clone(), None)
    outputs = batch.num_tokens * weight.shape[0]
    return Work(
        run=lambda: linear(x, layer),
        reference=lambda: linear_reference(x, weight, None),
        torch_way=lambda: torch.nn.functional.linear(x, weight),
        num_bytes=size_of(x, weight) + outputs * x.element_size(),
        num_flops=2 * outputs * sizes.hidden,
        tolerance=5 * TOLERANCE[dtype],
    )
