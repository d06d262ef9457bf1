"""Launches: what a GPU would compile and run, specialized as for an H200 and not run."""

from dataclasses import dataclass
from typing import Any, Final, Self
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.far_device import assert_far
from tests.kernels.sass import HOPPER, MachineCode, machine_code_of

_MAX_GRID: Final = (2**31 - 1, 65_535, 65_535)


class _Driver:
    """As much of a GPU's driver as a launch asks for before it compiles."""

    def __init__(self) -> None:
        self._device = id(self)  # kernels keep their binders and what they compiled by device

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


@dataclass(frozen=True, slots=True)
class Variant:
    """Names what Triton would compile."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    options: Any
    attrs: Any

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self.kernel.__name__)

    @property
    def constants(self) -> dict[str, Any]:
        """By argument."""
        return {self.kernel.arg_names[place[0]]: x for place, x in self.constexprs.items()}

    def machine_code(self) -> MachineCode:
        """Compile it."""
        source = ASTSource(self.kernel, self.signature, self.constexprs, self.attrs)
        return machine_code_of(source, self.options.__dict__)


class Launches:
    """While active, launches are taken down; each distinct specialization is one of `variants`."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        run, compiled = JITFunction.run, self._compiled

        def compile_it(kernel: Any, *args: Any, **_: Any) -> Any:
            return compiled(kernel, *args)

        def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            self._take_down(kernel, args, grid)
            return run(kernel, *args, grid=grid, warmup=True, **kwargs)

        self._patches: list[Any] = [
            patch.object(JITFunction, "run", launched),
            patch.object(JITFunction, "_do_compile", compile_it),
            patch.object(driver, "_active", _Driver()),
            patch.object(torch.cuda, "get_device_capability", lambda _device: (9, 0)),
        ]

    def __enter__(self) -> Self:
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()

    def _take_down(self, kernel: Any, args: tuple[Any, ...], grid: tuple[int, ...]) -> None:
        for size, most in zip(grid, _MAX_GRID, strict=False):
            assert 0 < size <= most, f"{kernel.__name__} on a grid of {grid}"
        assert_far(kernel.__name__, args)

    def _compiled(self, kernel: Any, key: str, *rest: Any) -> Variant:
        signature, device, constexprs, options, attrs = rest[:5]
        variant = Variant(kernel, signature, constexprs, options, attrs)
        self.variants.append(variant)
        kernel.device_caches[device][0][key] = variant
        return variant
