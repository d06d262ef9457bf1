"""A far device whose kernels are interpreted: all of a GPU but its speed and its rounding.

For the child of an `Interpreter`: imports triton, which must interpret there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.interpreter import GridExecutor

from tests.kernels.far_device import FarDevice, FarGenerator, assert_far, is_far, marked


@contextmanager
def far_device_interpreted() -> Iterator[FarDevice]:
    """Tensors of device "cuda" go to the kernels; launches of the host's tensors fail."""
    run = GridExecutor.__call__

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        assert_far(kernel.fn.__name__, args)
        with torch._C.DisableTorchFunction():
            return run(kernel, *args, **kwargs)

    make = torch.nn.Parameter.__new__

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        made = make(cls, data, requires_grad)
        return made if data is None else marked(made, is_far(data))

    with (
        patch.object(GridExecutor, "__call__", launched),
        patch.object(torch.nn.Parameter, "__new__", parameter),
        patch.object(torch, "Generator", FarGenerator),
        patch.object(torch.cuda, "get_device_capability", lambda _device: (9, 0)),
        patch.object(torch.cuda, "mem_get_info", lambda _device: (1 << 40, 1 << 40)),
        FarDevice() as device,
    ):
        yield device
