"""Finds every op that has Triton kernels; there is no registry to forget an op in.

Cases are listed by name and looked up when they run, in the process that runs them. An op that does
not import is a case that fails, so that it does not hide the other ops.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Final

import torch

import tokenmesh.kernels
from tokenmesh.kernels.specimen import Compilation, KernelCase

BROKEN: Final = "import"


def ops() -> list[str]:
    """Names of the packages in tokenmesh.kernels that hold a `triton` module."""
    return [
        module.name
        for module in pkgutil.iter_modules(tokenmesh.kernels.__path__)
        if module.ispkg and importlib.util.find_spec(f"tokenmesh.kernels.{module.name}.triton")
    ]


def triton_module(op: str) -> ModuleType:
    """The op's Triton module; importing it decorates its kernels."""
    return importlib.import_module(f"tokenmesh.kernels.{op}.triton")


def specimen_named(op: str, name: str) -> KernelCase:
    """One specimen; ValueError unless exactly one has the name."""
    specimens: list[KernelCase] = triton_module(op).specimens()
    (specimen,) = [each for each in specimens if each.name == name]
    return specimen


def compilation_named(op: str, name: str) -> Compilation:
    """One compilation; ValueError unless exactly one has the name."""
    compilations: list[Compilation] = triton_module(op).compilations()
    (compilation,) = [each for each in compilations if each.name == name]
    return compilation


def specimen_cases(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, str, torch.dtype]]:
    """(op, specimen, dtype) for each of these dtypes that the specimen has a tolerance for."""
    for op in ops():
        try:
            specimens: list[KernelCase] = triton_module(op).specimens()
        except Exception:
            yield op, BROKEN, dtypes[0]
            continue
        for specimen in specimens:
            yield from ((op, specimen.name, each) for each in dtypes if each in specimen.tolerance)


def compilation_cases() -> Iterator[tuple[str, str]]:
    """(op, compilation)."""
    for op in ops():
        try:
            compilations: list[Compilation] = triton_module(op).compilations()
        except Exception:
            yield op, BROKEN
            continue
        yield from ((op, each.name) for each in compilations)
