"""The matrices that adapters add to linear layers, and the tokens of a step that each is for."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch

MAX_RANK: Final = 512
"""The C kernel keeps a tile's products with A on its stack."""
TILE_TOKENS: Final = 4
"""Most tokens that the C kernel takes at once."""


@dataclass(frozen=True, slots=True)
class LoraPart:
    """One pair of matrices: adds (x @ a.T) @ b to neighboring outputs of a linear layer.

    r is the rank. The adapter's scaling is in b.
    """

    a: torch.Tensor
    """[r, I], contiguous."""
    b: torch.Tensor
    """[r, O], contiguous, of a's dtype."""
    first: int
    """The first of the O outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraExperts:
    """Pairs of matrices for all experts of a layer. E experts of inner width F."""

    num_experts: int
    a13: torch.Tensor | None = None
    """[E, r, H]; None: the first product stays as it is."""
    b13: torch.Tensor | None = None
    """[E, r, 2F], or [E, r, F] without a gate; its outputs in the order of the layer's."""
    a2: torch.Tensor | None = None
    """[E, r, F]"""
    b2: torch.Tensor | None = None
    """[E, r, H]"""

    @property
    def nbytes(self) -> int:
        parts = (self.a13, self.b13, self.a2, self.b2)
        return sum(each.nbytes for each in parts if each is not None)


@dataclass(frozen=True, slots=True, eq=False)
class HeadChange:
    """Changes one parameter of a head: replaces it, or adds b.T @ a to it."""

    whole: torch.Tensor | None = None
    """The new parameter; None: a and b count."""
    a: torch.Tensor | None = None
    """[r, I]"""
    b: torch.Tensor | None = None
    """[r, O]; the adapter's scaling is in it."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter with the change, a new tensor of its dtype."""
        if self.whole is not None:
            return self.whole.to(parameter.dtype)
        assert self.a is not None
        assert self.b is not None
        added = self.b.float().t() @ self.a.float()
        return (parameter.float() + added).to(parameter.dtype)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.whole, self.a, self.b) if each is not None)


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """One adapter, for all layers of a model. Compared by identity."""

    parts: Mapping[int, Sequence[LoraPart]]
    """By the number of a `LoraBank`; the parts of a merged layer change different outputs."""
    num_banks: int
    content_hash: str = ""
    """Another content has another one."""
    experts: Mapping[int, LoraExperts] = field(default_factory=dict)
    """By the number of a bank of experts."""
    head: Mapping[str, HeadChange] = field(default_factory=dict)
    """By the name of a parameter behind the states of a model that pools."""

    @cached_property
    def native(self) -> "NativeSites":
        """The same for C."""
        return NativeSites(self)

    @property
    def nbytes(self) -> int:
        """Memory of all matrices."""
        pairs = (each for parts in self.parts.values() for each in parts)
        linear = sum(each.a.nbytes + each.b.nbytes for each in pairs)
        experts = sum(each.nbytes for each in self.experts.values())
        return linear + experts + sum(each.nbytes for each in self.head.values())


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The tokens of a step by adapter; tokens without one are left out. T' tokens in all."""

    adapters: Sequence[LoraWeights]
    """Each once."""
    tokens: Sequence[Sequence[int]]
    """Tokens of the batch that each adapter is for, rising."""

    @classmethod
    def of(cls, spans: Sequence[tuple[LoraWeights | None, int]]) -> "AdapterRows | None":
        """From the adapter and the number of tokens of each row; None where none has an adapter."""
        tokens: dict[LoraWeights, list[int]] = {}
        first = 0
        for adapter, count in spans:
            if adapter is not None:
                tokens.setdefault(adapter, []).extend(range(first, first + count))
            first += count
        return cls(tuple(tokens), tuple(tokens.values())) if tokens else None

    @cached_property
    def indices(self) -> Sequence[torch.Tensor]:
        """`tokens` as int64 tensors."""
        return [torch.tensor(tokens) for tokens in self.tokens]

    @cached_property
    def native(self) -> "NativeRows":
        """The same for C."""
        return NativeRows(self)

    @cached_property
    def has_experts(self) -> bool:
        """True where an adapter of the step changes experts, which no program in C does."""
        return any(each.experts for each in self.adapters)

    def within(self, first: int, end: int) -> "AdapterRows | None":
        """Return the adapters of tokens [first, end), counted from `first`; None: no adapter."""
        adapters: list[LoraWeights] = []
        tokens: list[list[int]] = []
        for adapter, own in zip(self.adapters, self.tokens, strict=True):
            found = [each - first for each in own if first <= each < end]
            if found:
                adapters.append(adapter)
                tokens.append(found)
        return AdapterRows(adapters, tokens) if adapters else None

    def touches(self, number: int) -> bool:
        """Return whether an adapter of the step changes the layer of a bank."""
        return any(number in each.parts for each in self.adapters)


class _Part(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


class _Site(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("parts", ctypes.c_void_p))


class _Rows(ctypes.Structure):
    _fields_ = (
        ("tiles", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("firsts", ctypes.c_void_p),
        ("sites", ctypes.c_void_p),
    )


class NativeSites:
    """The parts of each bank as lora.h has them; the weights must live as long."""

    def __init__(self, weights: LoraWeights) -> None:
        self._sites = (_Site * weights.num_banks)()
        self._parts = []
        for number, parts in weights.parts.items():
            packed = (_Part * len(parts))(
                *(
                    _Part(
                        each.a.data_ptr(),
                        each.b.data_ptr(),
                        each.a.shape[0],
                        each.first,
                        each.b.shape[1],
                    )
                    for each in parts
                )
            )
            self._parts.append(packed)
            self._sites[number] = _Site(len(parts), ctypes.addressof(packed))

    @property
    def address(self) -> int:
        """The address of the first bank's site."""
        return ctypes.addressof(self._sites)


class NativeRows:
    """Tokens in tiles of one adapter, as lora.h has them."""

    def __init__(self, rows: AdapterRows) -> None:
        tokens: list[int] = []
        firsts: list[int] = []
        sites: list[int] = []
        for adapter, own in zip(rows.adapters, rows.tokens, strict=True):
            address = adapter.native.address
            for first in range(0, len(own), TILE_TOKENS):
                firsts.append(len(tokens) + first)
                sites.append(address)
            tokens += own
        firsts.append(len(tokens))
        self._tokens = (ctypes.c_int64 * len(tokens))(*tokens)
        self._firsts = (ctypes.c_int64 * len(firsts))(*firsts)
        self._sites = (ctypes.c_void_p * len(sites))(*sites)
        self._rows = _Rows(
            len(sites),
            ctypes.addressof(self._tokens),
            ctypes.addressof(self._firsts),
            ctypes.addressof(self._sites),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._rows)
