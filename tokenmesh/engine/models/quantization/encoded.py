"""EncodedWeight: a weight that has to be decoded from other tensors of the checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tokenmesh.engine.models.quantization.rules import Quantization
from tokenmesh.kernels.linear.formats import Codes, Format, FormatError, Part, merged
from tokenmesh.kernels.linear.formats.cut import CutWeight
from tokenmesh.kernels.linear.formats.parts import Tensors
from tokenmesh.shared.errors import CheckpointError


class Source(Protocol):
    """The stored tensors that parts are read from."""

    def part(self, name: str) -> Part | None:
        """A stored tensor; None if there is none, or of a type that no format has."""

    def file_of(self, name: str) -> Path:
        """The file that holds it; the directory if none does."""


@dataclass(frozen=True, slots=True)
class EncodedWeight:
    """A weight that is loaded like a plain tensor."""

    name: str
    shape: tuple[int, ...]
    format: Format
    parts: Mapping[str, Part]
    """Stored tensors by their names in the format."""
    file: Path
    """The file that holds the encoded numbers."""

    def fill(self, target: torch.Tensor) -> None:
        """Decode into a tensor of its shape, in any type and on any device.

        Raises CheckpointError for numbers that the type cannot hold.
        """
        tensors = {name: part.read() for name, part in self.parts.items()}
        if target.ndim == 2:
            self._fill(target, tensors, "")
            return
        # decoding all experts at once would take many times the memory
        for expert in range(len(target)):
            one = slice(expert, expert + 1)
            of_one = {name: tensor[one] for name, tensor in tensors.items()}
            self._fill(target[one], of_one, f", in expert {expert}")

    def fill_part(self, target: torch.Tensor, rows: slice, columns: slice) -> None:
        """Decode a part of a matrix. Bytes of the rest are not read, but to the next border."""
        tensors, rows, columns = self._read(rows, columns)
        try:
            target.copy_(self.format.reference(tensors)[rows, columns])
        except FormatError as error:
            raise _refusal(self.file, self.parts, error) from error
        self._check_finite(target, "")

    def codes(self, taken: Sequence[slice], columns: slice) -> Codes | None:
        """Return the codes of rows of a matrix, as kernels compute with them; None where its format
        has no codes. Of `columns` only, unless inputs have an order of their own.

        Bytes of the rest are not read, but to the next border. Raises CheckpointError for numbers
        that are not finite.
        """
        found = []
        for asked in taken:
            tensors, rows, own = self._read(asked, columns)
            codes = self._codes(tensors)
            if codes is None:
                return None
            if rows != slice(0, codes.shape[0]):
                codes = codes.rows(torch.arange(rows.start, rows.stop))
            if own != slice(0, codes.shape[1]):
                codes = codes.columns(own) or codes
            found.append(codes)
        return merged(found)

    def _read(self, rows: slice, columns: slice) -> tuple[Tensors, slice, slice]:
        """Tensors of the smallest weight that holds a part of this one, and where the part is."""
        axes = self.format.axes(self.parts)
        if axes is None:
            return {name: part.read() for name, part in self.parts.items()}, rows, columns
        outputs, inputs = self.shape
        cut = CutWeight.of(axes, (outputs, inputs), rows, columns)
        tensors = {
            name: cut.fitted(name, part.some(cut.slices(name, part.shape)))
            for name, part in self.parts.items()
        }
        first, left = cut.rows.start, cut.columns.start
        within = slice(rows.start - first, rows.stop - first)
        return tensors, within, slice(columns.start - left, columns.stop - left)

    def codes_by_expert(self) -> Callable[[int], Codes | None]:
        """As `codes`, for each matrix of a stack [E, ...]. The parts are read once, and held."""
        tensors = {name: part.read() for name, part in self.parts.items()}

        def of(expert: int) -> Codes | None:
            one = slice(expert, expert + 1)
            return self._codes({name: tensor[one] for name, tensor in tensors.items()})

        return of

    def _codes(self, tensors: Tensors) -> Codes | None:
        try:
            codes = self.format.codes(tensors)
        except FormatError as error:
            raise _refusal(self.file, self.parts, error) from error
        if codes is not None and not codes.is_finite():
            raise CheckpointError(
                f"{self.file}: tensor {self.name} has numbers that are infinite or NaN"
            )
        return codes

    def _fill(self, target: torch.Tensor, tensors: Tensors, where: str) -> None:
        try:
            target.copy_(self.format.reference(tensors))
        except FormatError as error:
            raise _refusal(self.file, self.parts, error) from error
        self._check_finite(target, where)

    def _check_finite(self, target: torch.Tensor, where: str) -> None:
        if not target.isfinite().all():
            problem = f"has numbers that {target.dtype} cannot hold{where}"
            raise CheckpointError(f"{self.file}: tensor {self.name} {problem}")


def find_encoded(
    names: Iterable[str], source: Source, how: Quantization
) -> Iterator[EncodedWeight]:
    """All encoded weights among the names. Raises CheckpointError where parts do not fit."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        form, stacks = how.format_of(module), how.stacks
        if form is not None and leaf == form.weight:
            yield from _encoded(f"{module}.weight", f"{module}.", form, source)
        elif stacks is not None and leaf.endswith(f"_{stacks.weight}"):
            whole = name.removesuffix(f"_{stacks.weight}")
            yield from _encoded(whole, f"{whole}_", stacks, source)


def _encoded(name: str, prefix: str, form: Format, source: Source) -> Iterator[EncodedWeight]:
    weight = source.part(f"{prefix}{form.weight}")
    if weight is None or weight.dtype not in form.stored:
        return
    found = {each: source.part(f"{prefix}{each}") for each in (form.weight, *form.others)}
    parts = {each: part for each, part in found.items() if part is not None}
    try:
        shape = form.shape_of(parts)
    except FormatError as error:
        part = parts.get(error.part, weight)
        raise _refusal(source.file_of(part.name), parts, error) from error
    yield EncodedWeight(name, shape, form, parts, source.file_of(weight.name))


def _refusal(file: Path, parts: Mapping[str, Part], error: FormatError) -> CheckpointError:
    name = parts[error.part].name if error.part in parts else error.part
    return CheckpointError(f"{file}: tensor {name} {error.problem}")
