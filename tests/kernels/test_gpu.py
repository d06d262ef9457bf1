"""Every case compiled and run on a GPU, in bfloat16 too."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.checks import check_named
from tests.kernels.discovery import kernel_cases

CASES = list(kernel_cases((torch.bfloat16, torch.float16, torch.float32)))
IDS = [f"{op}-{name}-{str(dtype).removeprefix('torch.')}" for op, name, dtype in CASES]


@pytest.mark.gpu
@pytest.mark.timeout(120)  # the first launch of a kernel compiles it
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("op", "name", "dtype"), CASES, ids=IDS)
def test_kernel_on_a_gpu_equals_the_reference(op: str, name: str, dtype: torch.dtype) -> None:
    check_named(op, name, dtype, "cuda")
