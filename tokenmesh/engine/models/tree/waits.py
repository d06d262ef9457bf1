"""Operations that wait for a GPU, which no recorded step can do."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS: Final = frozenset(
    {
        *("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
    }
)
"""Operations whose result, or its size, depends on numbers."""
_INDEXED: Final = frozenset({"index", "index_put", "index_put_", "_unsafe_index"})
_MASKS: Final = (torch.bool, torch.uint8)
_SYNCHRONIZING: Final = "synchronizing CUDA operation"
"""It holds what torch warns of."""


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what would wait, on any device; on a GPU also what torch itself sees waiting."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: str | None = None
        """The first of them."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        has_mask = name in _INDEXED and any(
            each is not None and each.dtype in _MASKS for each in args[1]
        )
        if self.seen is None and (name in _READS or has_mask):
            self.seen = name
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what happens within."""
        if not torch.cuda.is_available():
            with self:
                yield
            return
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(record=True) as caught, self:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")  # which itself warns of being a prototype
                yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
        if self.seen is None and any(_SYNCHRONIZING in str(each.message) for each in caught):
            self.seen = "a copy between host and device"
