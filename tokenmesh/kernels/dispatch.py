"""Chooses the implementation of an op: Triton for tensors on a GPU, `cpu.py` for the others.

Triton is imported by the first launch, so a machine without it can run everything on its CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch

_INTERPRETED: Final = ContextVar("tokenmesh_interpreted", default=False)


def uses_triton(x: torch.Tensor) -> bool:
    """Return whether an op on x goes to its Triton launcher."""
    return x.is_cuda or _INTERPRETED.get()


@contextmanager
def interpreted_on_cpu() -> Iterator[None]:
    """Send CPU tensors to the Triton launchers too; only of use with TRITON_INTERPRET=1."""
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)
