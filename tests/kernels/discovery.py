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
from tests.kernels.case import Compilation, KernelCase

BROKEN: Final = "import"


def ops() -> list[str]:
    """Names of the packages in tokenmesh.kernels that hold a `triton` module."""
    return [
        module.name
        for module in pkgutil.iter_modules(tokenmesh.kernels.__path__)
        if module.ispkg and importlib.util.find_spec(f"tokenmesh.kernels.{module.name}.triton")
    ]


def cases_module(op: str) -> ModuleType:
    """The op's `cases()` and `compilations()`."""
    return importlib.import_module(f"tests.kernels.cases.{op}")


def case_named(op: str, name: str) -> KernelCase:
    """One case; ValueError unless exactly one has the name."""
    cases: list[KernelCase] = cases_module(op).cases()
    (case,) = [each for each in cases if each.name == name]
    return case


def compilation_named(op: str, name: str) -> Compilation:
    """One compilation; ValueError unless exactly one has the name."""
    compilations: list[Compilation] = cases_module(op).compilations()
    (compilation,) = [each for each in compilations if each.name == name]
    return compilation


def kernel_cases(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, str, torch.dtype]]:
    """(op, case, dtype) for each of these dtypes that the case has a tolerance for."""
    for op in ops():
        try:
            cases: list[KernelCase] = cases_module(op).cases()
        except Exception:
            yield op, BROKEN, dtypes[0]
            continue
        for case in cases:
            yield from ((op, case.name, each) for each in dtypes if each in case.tolerance)


def compilation_cases() -> Iterator[tuple[str, str]]:
    """(op, compilation)."""
    for op in ops():
        try:
            compilations: list[Compilation] = cases_module(op).compilations()
        except Exception:
            yield op, BROKEN
            continue
        yield from ((op, each.name) for each in compilations)
