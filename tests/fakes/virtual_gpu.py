"""VirtualGpu: a GPU whose tensors lie in host memory and that is as strict as a real one.

Its tensors say that they are on `cuda:0`. While `VirtualGpu.strict` lasts it fails on what a launch
must not do: wait for the device, mix devices, read memory that a copy has not filled yet or write
what one still reads; and while a graph is recorded, on anything but a launch. A replay runs
the recorded operations on the recorded tensors: the host's variables of that time are gone.
Kernels are the packages' own functions on the CPU.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

DEVICE: Final = torch.device("cuda")
_T = torch.Tensor
_READS: Final = (
    "tolist", "item", "numpy", "cpu", "nonzero", "equal", "allclose", "masked_select", "unique",
    "__bool__", "__int__", "__float__", "__index__", "__contains__", "__repr__", "__array__",
)  # fmt: skip
_EMPTY: Final = ("empty", "empty_like", "new_empty", "empty_strided")


class GpuTensor(torch.Tensor):
    """Lies in host memory; only the mode of `VirtualGpu` computes with it."""


def is_gpu(value: object) -> bool:
    return isinstance(value, GpuTensor)


def plain(value: Any) -> Any:
    """The same without devices, also within dataclasses."""
    return _converted(value, _T)


def on_gpu(value: Any) -> Any:
    """The reverse."""
    return _converted(value, GpuTensor)


def _converted(value: Any, kind: type[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.as_subclass(kind)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: _converted(getattr(value, name), kind) for name in names}
        return dataclasses.replace(value, **fields)
    return value


@dataclass(slots=True)
class Op:
    """One recorded operation, on plain tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    def own(self) -> list[torch.Tensor]:
        """Return the tensors that it allocated."""
        theirs = {_memory(each) for each in _tensors((self.args, self.kwargs))}
        return [each for each in _tensors(self.out) if _memory(each) not in theirs]

    def run(self) -> None:
        own = self.own()
        out = self.func(*self.args, **self.kwargs)
        news = [new for old, new in zip(_tensors(self.out), _tensors(out), strict=True)
                if any(old is each for each in own)]  # fmt: skip
        for old, new in zip(own, news, strict=True):
            old.copy_(new)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    """Append the tensors in a value; every call of torch comes here, so it must be quick."""
    if isinstance(value, _T):
        found.append(value)
    elif isinstance(value, tuple | list):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)
    elif hasattr(type(value), "__dataclass_fields__"):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), found)


def poison(tensor: torch.Tensor) -> None:
    """Fill with values that show where a computation relies on them."""
    if tensor.numel() and tensor.dtype is not torch.bool:
        tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else -7)


class VirtualGpu(TorchFunctionMode):
    """While it is entered, torch knows this GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.is_strict = False
        self.recording: list[Op] | None = None
        self.transfers: list[Callable[[], None]] = []
        """Copies in flight, oldest first; to call is to complete."""
        self._pinned: dict[int, torch.Tensor] = {}

    @contextmanager
    def strict(self) -> Iterator[None]:
        """No waiting from now on."""
        before, self.is_strict = self.is_strict, True
        try:
            yield
        finally:
            self.is_strict = before

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[_memory(tensor)] = tensor
        return tensor

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A launch: all tensors are the device's, and what is read is read by the device."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            tensors = _tensors((args, kwargs))
            if not any(map(is_gpu, tensors)):
                return function(*args, **kwargs)
            for each in tensors:
                assert is_gpu(each), f"{function.__name__} takes a tensor of the host"
            with torch._C.DisableTorchFunction():
                return self._run(function, tree_map(plain, args), tree_map(plain, kwargs))

        return launch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._call(func, tuple(args), dict(kwargs or {}))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        tensors = _tensors((args, kwargs))
        is_here = any(is_gpu(each) for each in tensors)
        if name == "__get__":
            return self._property(func, args, is_here)
        if name == "pin_memory":
            return self.pin(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return self.pin(func(*args, **kwargs))
        if name == "copy_":
            return self._copy(*args, **kwargs)
        target = self._target(name, args, kwargs)
        if target is not None:
            return self._move(func, args, kwargs, target)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            assert not (self.is_strict and name in ("tensor", "as_tensor")), f"{name} waits"
            return self._make(func, name, args, {**kwargs, "device": torch.device("cpu")})
        if not is_here:
            return func(*args, **kwargs)
        self._check(name, args, kwargs, tensors)
        out = self._run(func, tree_map(plain, args), tree_map(plain, kwargs))
        if name in _EMPTY:
            poison(plain(out))
        return plain(out) if name in _READS else out

    def _property(self, func: Any, args: tuple[Any, ...], is_here: bool) -> Any:
        name = getattr(func.__self__, "__name__", "")
        if is_here and name == "device":
            return DEVICE
        if is_here and name in ("is_cuda", "is_cpu"):
            return name == "is_cuda"
        out = func(*map(plain, args))
        return on_gpu(out) if is_here else out

    def _target(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.device | None:
        """Where `to` goes, when it says so."""
        if name == "cuda":
            return DEVICE
        if name != "to":
            return None
        devices = [each for each in (*args[1:], kwargs.get("device"))
                   if isinstance(each, torch.device | str)]  # fmt: skip
        return torch.device(devices[0]) if devices else None

    def _move(self, func: Any, args: Any, kwargs: Any, target: torch.device) -> Any:
        source = args[0]
        rest = [each for each in args[1:] if not isinstance(each, torch.device | str)]
        more = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "copy")}
        if is_gpu(source) == (target.type == "cuda"):
            return self._wrapped(source, source.to(*rest, **more) if rest or more else source)
        converted = plain(source).to(*rest, **more) if rest or more else plain(source)
        out = torch.empty_like(converted)
        if target.type == "cuda":
            assert not self.is_strict or converted is plain(source) or not rest, "converts on host"
            out = on_gpu(out)
        self._copy(out, source, kwargs.get("non_blocking", False))
        return out

    def _wrapped(self, source: Any, out: Any) -> Any:
        return on_gpu(out) if is_gpu(source) else out

    def _copy(self, into: Any, source: Any, non_blocking: bool = False) -> Any:
        if is_gpu(into) == is_gpu(source):
            if is_gpu(into):
                self._run(_T.copy_, (plain(into), plain(source)), {})
                return into
            return into.copy_(source)
        assert self.recording is None, "a copy from or to the host is recorded"
        host, what = (source, "from") if is_gpu(into) else (into, "to")
        is_async = non_blocking and _memory(host) in self._pinned
        assert is_async or not self.is_strict or not host.numel(), f"a copy {what} the host waits"
        values = plain(source).clone()
        if not is_async:
            self.complete(len(self.transfers))
        if is_gpu(into) or not is_async:
            plain(into).copy_(values)
        if is_async and is_gpu(into):
            self.transfers.append(lambda: _assert_same(source, values))
        elif is_async:
            poison(into)
            self.transfers.append(lambda: into.copy_(values))
        return into

    def complete(self, count: int) -> None:
        """So many copies."""
        for _ in range(count):
            self.transfers.pop(0)()

    def _make(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        out = self._run(func, tree_map(plain, args), kwargs)
        if name in _EMPTY:
            poison(plain(out))
        return out

    def _check(self, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        """Raise for what fails on a GPU and, where it matters, for what waits."""
        hosts = [each for each in tensors if not is_gpu(each)]
        assert all(each.dim() == 0 for each in hosts), f"{name} mixes devices"
        if not self.is_strict and self.recording is None:
            return
        assert name not in _READS, f"{name} waits for the device"
        if name == "where":
            values = args[1:]
            assert all(map(is_gpu, values)), "where waits for its numbers to reach the device"
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for each in index:
                assert not isinstance(each, list), "a list as an index is copied to the device"
                is_mask = isinstance(each, torch.Tensor) and each.dtype is torch.bool
                assert not is_mask, "a mask as an index waits for the device"
            assert name == "__getitem__" or is_gpu(args[2]) or not hosts, "a value is copied"

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if self.recording is not None:
            self.recording.append(Op(func, args, kwargs, out))
        return tree_map(on_gpu, out)


def _assert_same(source: torch.Tensor, values: torch.Tensor) -> None:
    assert torch.equal(source, values), "memory was written to that a copy still read"
