"""Define what adapters may change of a model, by the names of transformers' tree: linear layers,
experts, and the heads of models that pool."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final

import torch

from tokenmesh.kernels.linear import Linear
from tokenmesh.kernels.lora import LoraBank, StepAdapters
from tokenmesh.kernels.moe import DeviceExperts, ExpertsSpec, Weights
from tokenmesh.kernels.rope import interleave_rows


@dataclass(frozen=True, slots=True)
class TurnedRows:
    """The first outputs of a projection, which are kept in the order that rope turns."""

    count: int
    head_dim: int
    rotary_dim: int

    def of(self, first: int, size: int) -> "TurnedRows | None":
        """Return the rows of the outputs [first, first + size) of a merged projection; None: of
        none of them.
        """
        count = min(self.count - first, size)
        return TurnedRows(count, self.head_dim, self.rotary_dim) if count > 0 else None

    def turn(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [O, ...] as a checkpoint has them -> as the layer has them; may be the same."""
        turned = interleave_rows(rows[: self.count], self.head_dim, self.rotary_dim)
        return torch.cat([turned, rows[self.count :]])


@dataclass(frozen=True, slots=True)
class TakenWeight:
    """It says what one of several ranks has of a linear layer's weight."""

    outputs: int
    """All outputs of the layer."""
    inputs: int
    rows: tuple[slice, ...]
    """The outputs of this rank."""
    columns: tuple[slice, ...]
    """Its inputs."""


@dataclass(frozen=True, slots=True)
class TakenExperts:
    """It says what one of several ranks has of a layer's experts."""

    num_experts: int
    """All experts of the layer."""
    inner: int
    """Their whole width; 0: each rank has whole experts."""
    experts: slice
    """This rank has these."""
    rows: tuple[slice, ...] | None
    """Outputs of the first product; None: all of them."""
    columns: tuple[slice, ...] | None
    """Inputs of the second product."""


ELSEWHERE: Final = -1
"""The number of a bank that another stage of a pipeline has."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One module of the tree: a linear layer, or some outputs of a merged one. Compared by
    identity."""

    number: int
    """This is the number of the layer's bank, or `ELSEWHERE`."""
    first: int
    """First output in the layer."""
    outputs: int
    inputs: int
    turned: TurnedRows | None = None
    taken: TakenWeight | None = None
    """None: the rank has all of the module."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return outputs and inputs of the whole module."""
        found = self.taken or self
        return found.outputs, found.inputs


@dataclass(frozen=True, slots=True)
class ExpertsSite:
    """The experts of one layer: parameters [E, outputs, inputs] for each of both products."""

    number: int
    """This is the number of the layer's bank."""
    num_experts: int
    hidden: int
    inner: int
    is_gated: bool
    is_reordered: bool
    """The checkpoint has gate and up by turns, the layer all gates first."""
    taken: TakenExperts | None = None
    """None: the rank has all of the experts."""

    @property
    def whole(self) -> "ExpertsSite":
        """Return the experts of all ranks."""
        if self.taken is None:
            return self
        inner = self.taken.inner or self.inner
        return replace(self, num_experts=self.taken.num_experts, inner=inner)

    @property
    def first_outputs(self) -> int:
        """Return the number of outputs of the first product."""
        return 2 * self.inner if self.is_gated else self.inner


@dataclass(frozen=True, slots=True)
class HeadSite:
    """A parameter behind the states of a model that pools."""

    name: str
    shape: tuple[int, ...]
    is_linear: bool
    """It tells whether it is the weight of a linear layer, which matrices may change."""


@dataclass(slots=True)
class AdapterSites:
    """All sites of one model. Filled while the model is built."""

    prefixes: tuple[str, ...] = ("",)
    """Names of the tree that stand before each of `by_name`."""
    former: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names that earlier versions of transformers had, and what they are now."""
    by_name: dict[str, Site] = field(default_factory=dict)
    experts: dict[str, ExpertsSite] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Further modules, each with the reason why adapters cannot change it."""
    head: dict[str, HeadSite] = field(default_factory=dict)
    """By the name of the parameter."""
    unused: tuple[str, ...] = ()
    """Names below `prefixes` of modules that the model has and does not run."""
    step: StepAdapters = field(default_factory=StepAdapters)
    num_banks: int = 0

    def add(
        self,
        layer: Linear,
        names: Iterable[str],
        sizes: Iterable[int],
        inputs: int,
        turned: TurnedRows | None = None,
        taken: Sequence[TakenWeight | None] = (),
    ) -> None:
        """A layer that is made of the modules `names`, of so many outputs each.

        taken: what this rank has of each; empty: all.
        """
        layer.adapters = bank = self.new_bank()
        first = 0
        for name, size, own in zip_longest(names, sizes, taken):
            order = None if turned is None else turned.of(first, size)
            self.by_name[name] = Site(bank.number, first, size, inputs, order, own)
            first += size

    def new_bank(self) -> LoraBank:
        self.num_banks += 1
        return LoraBank(self.num_banks - 1, self.step)

    def shapes(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the shapes of each bank, by number: inputs, and first output and outputs of each
        of its parts.
        """
        parts: list[dict[int, int]] = [{} for _ in range(self.num_banks)]
        inputs = [0] * self.num_banks
        for site in self.by_name.values():
            if site.number == ELSEWHERE:
                continue
            parts[site.number][site.first] = site.outputs
            inputs[site.number] = site.inputs
        return [(inputs[n], sorted(each.items())) for n, each in enumerate(parts)]

    def find(self, name: str) -> Site | None:
        """Return the site of a module by its path in the tree."""
        olds = (old for old in self.former if name.startswith(old))
        for each in (name, *(self.former[old] + name[len(old) :] for old in olds)):
            for prefix in self.prefixes:
                if each.startswith(prefix) and (site := self.by_name.get(each[len(prefix) :])):
                    return site
        return None

    def find_experts(self, path: str) -> ExpertsSite | None:
        """Return the site of a module of experts by its path in the tree."""
        found = (self.experts.get(path.removeprefix(prefix)) for prefix in self.prefixes)
        return next((site for site in found if site is not None), None)

    def is_unused(self, name: str) -> bool:
        """Return whether a module changes no answer of the model, as the pooler of an embedding
        model.
        """
        paths = [f"{prefix}{each}." for prefix in self.prefixes for each in self.unused]
        return any(f"{name}.".startswith(path) for path in paths)

    def add_experts(
        self,
        name: str,
        w13: Weights,
        w2: Weights,
        spec: ExpertsSpec,
        *,
        is_interleaved: bool,
        taken: TakenExperts | None = None,
    ) -> LoraBank:
        """The experts of a layer as they are packed; is_interleaved: in the checkpoint; taken: what
        this rank has of them."""
        bank = self.new_bank()
        if isinstance(w2, DeviceExperts) or (isinstance(w2, torch.Tensor) and w2.is_cuda):
            self.refused[name] = "adapters of experts are served on CPUs only"
            return bank
        if isinstance(w2, torch.Tensor):
            count, *sides = w2.shape
            inner, hidden = sides if spec.is_transposed else sides[::-1]
        else:
            count, hidden, inner = w2.num_experts, w2.out_features, w2.in_features
        is_reordered = is_interleaved and not isinstance(w13, torch.Tensor)
        self.experts[name] = ExpertsSite(
            bank.number, count, hidden, inner, spec.is_gated, is_reordered, taken
        )
        return bank

    def refusal(self, name: str) -> str | None:
        """Why a module that is there cannot have an adapter."""
        found = (self.refused.get(name.removeprefix(prefix)) for prefix in self.prefixes)
        return next((why for why in found if why is not None), None)
