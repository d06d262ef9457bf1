"""Finds every op that has Triton kernels; there is no registry to forget an op in."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import torch

import tokenmesh.kernels
from tokenmesh.kernels.specimen import Compilation, Specimen


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


def specimen_named(op: str, name: str) -> Specimen:
    """One specimen; ValueError unless exactly one has the name."""
    specimens: list[Specimen] = triton_module(op).specimens()
    (specimen,) = [each for each in specimens if each.name == name]
    return specimen


def specimen_cases(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, str, torch.dtype]]:
    """(op, specimen, dtype) for each of these dtypes that the specimen has a tolerance for."""
    for op in ops():
        for specimen in triton_module(op).specimens():
            for dtype in dtypes:
                if dtype in specimen.tolerance:
                    yield op, specimen.name, dtype


def compilation_cases() -> Iterator[tuple[str, Compilation]]:
    """Every compilation, with its op."""
    for op in ops():
        for compilation in triton_module(op).compilations():
            yield op, compilation
