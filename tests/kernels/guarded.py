"""Memory that shows writes out of place: around and between inputs, around what an op allocates."""

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.case import Inputs

GUARD_BYTES: Final = 1 << 16
"""More than a tile that lost its mask writes too far."""
_POISON: Final = 0xFF  # NaN in every float format, -1 in every integer
_ALLOCATIONS: Final = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


class Guarded:
    """Copies of inputs whose storages stand between guards; strides and aliasing are kept.

    Bytes of a storage that belong to no input (padding of rows, what a slice left out) are poison
    too, so reading them gives NaN and writing them is found.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = dict(inputs)
        self._storages: list[tuple[torch.Tensor, torch.Tensor]] = []
        by_storage: dict[int, list[str]] = {}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.numel():
                by_storage.setdefault(value.untyped_storage().data_ptr(), []).append(name)
        for names in by_storage.values():
            self._guard({name: inputs[name] for name in names})

    def _guard(self, views: dict[str, torch.Tensor]) -> None:
        first = next(iter(views.values()))
        original = _bytes_of(first)
        buffer = _poisoned(original.numel() + 2 * GUARD_BYTES, first.device)
        inside = buffer[GUARD_BYTES : GUARD_BYTES + original.numel()]
        covered = torch.zeros_like(inside, dtype=torch.bool)
        for name, view in views.items():
            covered |= _covered_by(view, original.numel())
            self.inputs[name] = _placed(view, buffer)
        inside[covered] = original[covered]
        self._storages.append((buffer, buffer.clone()))

    def assert_untouched(self, written: set[str]) -> None:
        """Nothing has changed but the inputs named `written`."""
        for buffer, before in self._storages:
            allowed = torch.zeros_like(buffer, dtype=torch.bool)
            for name in written:
                if name in self._names_in(buffer):
                    allowed |= _covered_by(self.inputs[name], buffer.numel())
            touched = ((buffer != before) & ~allowed).nonzero().flatten()
            assert not len(touched), (
                f"wrote {len(touched)} bytes it may not write, the first at {int(touched[0])} of "
                f"{buffer.numel()} with guards of {GUARD_BYTES}: {self._names_in(buffer)}"
            )

    def _names_in(self, buffer: torch.Tensor) -> list[str]:
        return [
            name
            for name, value in self.inputs.items()
            if isinstance(value, torch.Tensor)
            and value.untyped_storage().data_ptr() == buffer.data_ptr()
        ]


class GuardedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, new memory is poisoned and stands between guards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _ALLOCATIONS or not result.numel():
            return result
        num_bytes = result.untyped_storage().nbytes() + 2 * GUARD_BYTES
        self._buffers.append(_poisoned(num_bytes, result.device))
        return _placed(result, self._buffers[-1])

    def assert_untouched(self) -> None:
        """Nothing was written beyond the ends of what was allocated."""
        for buffer in self._buffers:
            for guard in (buffer[:GUARD_BYTES], buffer[-GUARD_BYTES:]):
                touched = int((guard != _POISON).sum())
                assert not touched, f"wrote {touched} bytes past the end of new memory"


def _poisoned(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.full((num_bytes,), _POISON, dtype=torch.uint8, device=device)


def _placed(like: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout whose storage is the inside of a guarded buffer."""
    typed = buffer[GUARD_BYTES : len(buffer) - len(buffer) % like.element_size()].view(like.dtype)
    offset = typed.storage_offset() + like.storage_offset()
    return typed.as_strided(like.shape, like.stride(), offset)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _covered_by(view: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """bool [num_bytes]: which bytes of its storage a view can reach."""
    size = view.element_size()
    covered = torch.zeros(num_bytes, dtype=torch.bool, device=view.device)
    shape = [
        1 if stride == 0 else length
        for length, stride in zip(view.shape, view.stride(), strict=True)
    ]
    strides = [stride * size for stride in view.stride()]
    covered.as_strided((*shape, size), (*strides, 1), view.storage_offset() * size).fill_(True)
    return covered
