"""FarDevice: "cuda" on the host's memory, for what torch itself would refuse on a GPU.

While it is active, tensors of device "cuda" are the host's with a mark on them. Like a GPU's they
do not mix with the host's, a copy to the device loses the strides of what is not dense, and reading
them can be forbidden.
"""

from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

FAR: Final = torch.device("cuda", 0)
_HOST: Final = torch.device("cpu")
_MARK: Final = "is_far"
_READS: Final = frozenset(
    {"item", "tolist", "__int__", "__float__", "__bool__", "__index__", "cpu", "numpy", "nonzero"}
)
_MIXES: Final = frozenset(
    {"copy_", "__getitem__", "__setitem__", "_has_compatible_shallow_copy_type"}
)


class FarGenerator(torch.Generator):
    """`torch.Generator` on either device."""

    def __new__(cls, device: Any = _HOST) -> "FarGenerator":
        """The host's for torch, whatever it is for us."""
        return super().__new__(cls)

    def __init__(self, device: Any = _HOST) -> None:
        super().__init__()
        self._where = torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """As it was asked for."""
        return self._where


class FarDevice(TorchFunctionMode):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, tensors = _name_of(func), _tensors_in((args, kwargs))
        far = [tensor for tensor in tensors if is_far(tensor)]
        if name == "is_cuda" and tensors:
            return bool(far)
        if name == "device" and far:
            return FAR
        if name == "pin_memory":
            return args[0]
        kwargs.pop("pin_memory", None)
        assert self.may_read or not far or name not in _READS, f"{name} waits for the device"
        if name == "to":
            return self._moved(args, kwargs)
        if name == "data=":
            func(*args)
            return marked(args[0], is_far(args[1]))
        there = bool(far) and name not in ("cpu", "numpy")
        if kwargs.get("device") is not None:
            there = _is_there(kwargs["device"])
            if there:
                kwargs["device"] = _HOST
        elif far and name not in _MIXES:
            near = [each for each in tensors if not is_far(each) and each.dim()]
            assert not near, f"{name} of tensors on two devices"
        return marked(func(*args, **kwargs), there)

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        tensor: torch.Tensor = args[0]
        there, dtype = is_far(tensor), tensor.dtype
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, torch.Tensor):
                there, dtype = is_far(value), value.dtype
            elif isinstance(value, torch.device | str):
                if torch.device(value).type == "meta":
                    return tensor.to(*args[1:], **kwargs)
                there = _is_there(value)
            elif isinstance(value, torch.dtype):
                dtype = value
        if there == is_far(tensor):
            moved = tensor.to(dtype)
            if moved is not tensor:
                marked(moved, there)
            return moved
        assert self.may_read or there, "a copy to the host waits"
        # of a slice this is contiguous, unlike the slice
        moved = torch.empty_like(tensor, dtype=dtype).copy_(tensor)
        marked(moved, there)
        return moved


def is_far(tensor: torch.Tensor) -> bool:
    """Return whether the tensor counts as one of the far device."""
    return bool(tensor.__dict__.get(_MARK, False))


def assert_far(kernel: str, args: tuple[Any, ...]) -> None:
    """No argument of a launch is a tensor on the host."""
    for arg in args:
        is_right = not isinstance(arg, torch.Tensor) or is_far(arg)
        assert is_right, f"{kernel} of a tensor on the host"


def _is_there(device: Any) -> bool:
    return torch.device(device).type == FAR.type


def _name_of(func: Any) -> str:
    """A getter's is that of its attribute, a setter's has = after it."""
    name: str = func.__name__
    if name not in ("__get__", "__set__"):
        return name
    return f"{func.__self__.__name__}{'=' if name == '__set__' else ''}"


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def marked(result: Any, there: bool) -> Any:
    """The same, its tensors counted as those of either device."""
    for tensor in _tensors_in(result):
        tensor.__dict__[_MARK] = there
    return result
