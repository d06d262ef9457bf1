"""Mixers with a state (gated delta rule, Mamba, short convolution).

Those whose operations we have run over all rows of a step at once. For others, rows that decode go
together as a batch of one token each, longer chunks one by one, through the module's own forward.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tokenmesh.kernels.state_rows import StateRows
from tokenmesh.services.worker_svc.layers.step import HostStep
from tokenmesh.services.worker_svc.models.hf.run import (
    CONV,
    RECURRENT,
    Run,
    RunCache,
    UnservedModel,
    cache_argument,
)
from tokenmesh.services.worker_svc.models.hf.state_forms import (
    FlatMixer,
    MixerStates,
    has_flat_form,
)


def calls(module: torch.nn.Module, name: str) -> bool:
    """Whether a method of a module's own class names a method of the cache."""
    own = vars(type(module))
    methods = [inspect.unwrap(method) for method in own.values() if inspect.isfunction(method)]
    return "forward" in own and any(name in method.__code__.co_names for method in methods)


FORMS: Final = ("all rows at once", "row by row", "token by token")
"""How mixers run, fastest first."""


@dataclass(slots=True)
class MixerPort:
    """One mixer: its module, and where its states are."""

    run: Run
    cache: RunCache
    module: torch.nn.Module
    places: dict[tuple[str, int], tuple[int, int]]
    """State -> layer and item of the store; empty until the probe has seen them."""
    probed: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """States that the probe saw."""
    flat: FlatMixer | None = None
    """Runs all rows at once through kernels; None: row by row through the module's own forward."""
    takes_chunks: bool = True
    """Whether the module goes on from a state with several tokens at once."""

    def take_form(self, form: str) -> None:
        is_flat = form == FORMS[0] and has_flat_form(type(self.module))
        self.flat = FlatMixer(self.module) if is_flat else None
        self.takes_chunks = form != FORMS[2]

    def forward(self, inner: Any, hidden: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
        """hidden [1, T, H] -> [1, T, H]."""
        step = self.run.step
        if step is None:
            return self._probe(inner, hidden, named)
        if self.flat is not None:
            assert step.state_rows is not None
            return self._all_at_once(self.flat, hidden[0], step.state_rows)[None]
        assert isinstance(step, HostStep), "a GPU runs mixers that have kernels"
        out: torch.Tensor | None = None
        for tokens, rows in _batches(step):
            flat = hidden[0, tokens]
            batch = flat.view(len(rows), -1, hidden.shape[-1])
            parts = [batch] if self.takes_chunks else torch.split(batch, 1, dim=1)
            mixed = torch.cat([self._mix(inner, part, rows, named) for part in parts], dim=1)
            mixed = mixed.flatten(0, 1)
            if len(flat) == hidden.shape[1]:
                return mixed[None]
            if out is None:
                out = mixed.new_empty(1, hidden.shape[1], mixed.shape[-1])
            out[0, tokens] = mixed
        assert out is not None
        return out

    def _probe(self, inner: Any, hidden: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
        if self.probed:
            raise UnservedModel(f"a {type(self.module).__name__} runs twice in one pass")
        mixed = _mixed(inner(hidden, **named))
        self.probed, self.run.states = self.run.states, {}
        return mixed

    def _all_at_once(self, flat: FlatMixer, hidden: torch.Tensor, rows: StateRows) -> torch.Tensor:
        store = self.run.store
        assert store is not None
        tensors = {kind: store.layers[a][b] for (kind, _), (a, b) in self.places.items()}
        return flat(hidden, MixerStates(rows, tensors[CONV], tensors.get(RECURRENT)))

    def _mix(
        self, inner: Any, batch: torch.Tensor, rows: list[int], named: dict[str, Any]
    ) -> torch.Tensor:
        store = self.run.store
        assert store is not None
        index = torch.tensor(rows)
        tensors = {key: store.layers[layer][item] for key, (layer, item) in self.places.items()}
        self.run.states = {key: tensor[index] for key, tensor in tensors.items()}
        try:
            mixed = _mixed(inner(batch, **named))
            for key, tensor in tensors.items():
                tensor[index] = self.run.states[key].to(tensor.dtype)
        finally:
            self.run.states = {}
        return mixed


def _mixed(result: object) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        raise UnservedModel("a mixer returns more than one tensor")
    return result


def _batches(step: HostStep) -> list[tuple[slice, list[int]]]:
    """Tokens and row numbers of rows that are computed together; single tokens come first."""
    num_single = sum(1 for count in step.counts if count == 1)
    batches = [(slice(0, num_single), list(step.numbers[:num_single]))] if num_single else []
    first = num_single
    for number, count in zip(step.numbers[num_single:], step.counts[num_single:], strict=True):
        batches.append((slice(first, first + count), [number]))
        first += count
    return batches


def wrap(module: torch.nn.Module, run: Run, cache: RunCache) -> MixerPort:
    """Replace the module's forward on this instance; its port has no places yet."""
    port = MixerPort(run, cache, module, {})
    inner = module.forward
    parameters = inspect.signature(inner).parameters
    cache_name = cache_argument(inner)

    def forward(hidden_states: torch.Tensor, *args: Any, **named: Any) -> Any:
        named = {**dict(zip(list(parameters)[1:], args, strict=False)), **named}
        named.pop("attention_mask", None)
        if cache_name is not None:
            named[cache_name] = cache
        return port.forward(inner, hidden_states, named)

    module.forward = forward
    return port
