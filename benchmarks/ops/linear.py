"""Work of linear: the wide projection of an MLP."""

from pathlib import Path

import torch

from benchmarks.ops.batch import Batch
from benchmarks.ops.work import Dimensions, Work, size_of
from tokenmesh.engine.exec.build import NATIVE_SPIN_US
from tokenmesh.kernels import native
from tokenmesh.kernels.linear import (
    TOLERANCE,
    Linear,
    PlainWeight,
    linear,
    linear_reference,
    pack,
)
from tokenmesh.shared.config.worker import WorkerSettings


def linear_work(batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device) -> Work:
    """x [tokens, hidden] by the gate and up weights in one."""
    x = torch.randn(batch.num_tokens, sizes.hidden, device=device).to(dtype)
    weight = torch.randn(2 * sizes.intermediate, sizes.hidden, device=device)
    weight = weight.mul_(sizes.hidden**-0.5).to(dtype)
    layer = _packed(weight.clone())
    outputs = batch.num_tokens * weight.shape[0]
    return Work(
        run=lambda: linear(x, layer),
        reference=lambda: linear_reference(x, weight, None),
        torch_way=lambda: torch.nn.functional.linear(x, weight),
        num_bytes=size_of(x, weight) + outputs * x.element_size(),
        num_flops=2 * outputs * sizes.hidden,
        tolerance=5 * TOLERANCE[dtype],
    )


def _packed(weight: torch.Tensor) -> Linear:
    """As the engine packs it: for the C kernels where there are any; cuBLAS takes it plain."""
    if weight.is_cuda:
        return Linear(PlainWeight(weight, None))
    return pack(weight, None, has_native(weight.device))


def has_native(device: torch.device) -> bool:
    """Start the C kernels as the engine does; False where there are none, as on a GPU."""
    return device.type == "cpu" and native.start(
        torch.get_num_threads(),
        NATIVE_SPIN_US,
        Path(WorkerSettings().native_cache_dir),
    )
