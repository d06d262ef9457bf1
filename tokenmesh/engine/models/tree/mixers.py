"""Mixers with a state (gated delta rule, Mamba, short convolution).

Transformers' mixers call their convolution and their recurrence as globals of `forward`. A copy of
`forward` gets kernels there, which take the flat tokens of all rows of a step and know whose state
is where; projections, gates and norms remain the module's own: no family needs code here. Without
such kernels rows that decode go together as a batch of one token each, longer chunks one by one.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Final, Literal, TypeVar

import torch

from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.tree.run import (
    CONV,
    RECURRENT,
    ModulePlace,
    Run,
    RunCache,
    StateKey,
    UnservedModel,
    cache_argument,
)
from tokenmesh.kernels.causal_conv import causal_conv
from tokenmesh.kernels.gated_delta import gated_delta
from tokenmesh.kernels.mamba2 import mamba2
from tokenmesh.kernels.state_rows import StateRows

FORMS: Final = ("all rows at once", "row by row", "token by token")
"""It says how mixers run, fastest first."""
_CONVOLUTION: Final = "causal_conv1d_fn"
_DELTA_RULES: Final = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_SCAN: Final = "mamba2_chunk_scan"
_OF_STATES: Final = frozenset({"output_final_state", "return_final_states", "chunk_size"})
"""Arguments that change neither outputs nor states."""

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def calls(module: torch.nn.Module, name: str) -> bool:
    """Return whether a method of a module's own class names a method of the cache."""
    own = vars(type(module))
    methods = [inspect.unwrap(method) for method in own.values() if inspect.isfunction(method)]
    return "forward" in own and any(name in method.__code__.co_names for method in methods)


def has_flat_form(kind: type[torch.nn.Module]) -> bool:
    """Return whether all that `kind` does with its states is what the kernels do.

    Not so for mixers of the first Mamba: their recurrence is another one.
    """
    names = set(_forward_of(kind).__code__.co_names)
    has_kernel = "update_recurrent_state" not in names or names & {*_DELTA_RULES, _SCAN}
    return _CONVOLUTION in names and bool(has_kernel)


def _forward_of(kind: type[torch.nn.Module]) -> FunctionType:
    forward = inspect.unwrap(kind.forward)
    assert isinstance(forward, FunctionType)
    return forward


@dataclass(slots=True)
class MixerPort:
    """One mixer: its module, and where its states are."""

    run: Run
    module: torch.nn.Module
    inner: Callable[..., torch.Tensor]
    """The module's own forward."""
    cache: dict[str, RunCache]
    """By the name of its argument."""
    places: dict[StateKey, ModulePlace] = field(default_factory=dict)
    """Empty until the probe has seen its states."""
    probed: dict[StateKey, torch.Tensor] = field(default_factory=dict)
    """States that the probe saw."""
    takes_chunks: bool = True
    """It tells whether the module goes on from a state with several tokens at once."""
    _flat: Callable[..., torch.Tensor] | None = None
    """Its forward with kernels; None: row by row through its own."""

    def take_form(self, form: str) -> None:
        is_flat = form == FORMS[0] and has_flat_form(type(self.module))
        self._flat = self._with_kernels() if is_flat else None
        self.takes_chunks = form != FORMS[2]

    def forward(self, hidden: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
        """hidden [1, T, H] -> [1, T, H]."""
        step = self.run.step
        if step is None:
            return self._probe(hidden, named)
        if self._flat is not None:
            self.run.rows = step.state_rows
            try:
                return self._flat(hidden)
            finally:
                self.run.rows = None
        assert isinstance(step, HostStep), "a GPU runs mixers that have kernels"
        out: torch.Tensor | None = None
        for tokens, rows in _batches(step):
            flat = hidden[0, tokens]
            batch = flat.view(len(rows), -1, hidden.shape[-1])
            parts = [batch] if self.takes_chunks else torch.split(batch, 1, dim=1)
            mixed = torch.cat([self._mix(part, rows, named) for part in parts], dim=1).flatten(0, 1)
            if len(flat) == hidden.shape[1]:
                return mixed[None]
            if out is None:
                out = mixed.new_empty(1, hidden.shape[1], mixed.shape[-1])
            out[0, tokens] = mixed
        assert out is not None
        return out

    def _probe(self, hidden: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
        if self.probed:
            raise UnservedModel(f"a {type(self.module).__name__} runs twice in one pass")
        mixed = self.inner(hidden, **named)
        if not isinstance(mixed, torch.Tensor):
            raise UnservedModel("a mixer returns more than one tensor")
        self.probed, self.run.states = self.run.states, {}
        return mixed

    def _mix(self, batch: torch.Tensor, rows: list[int], named: dict[str, Any]) -> torch.Tensor:
        index = torch.tensor(rows)
        tensors = {key: place.tensor for key, place in self.places.items()}
        self.run.states = {key: tensor[index] for key, tensor in tensors.items()}
        try:
            mixed = self.inner(batch, **named)
            for key, tensor in tensors.items():
                tensor[index] = self.run.states[key].to(tensor.dtype)
        finally:
            self.run.states = {}
        return mixed

    def _with_kernels(self) -> Callable[..., torch.Tensor]:
        own = _forward_of(type(self.module))
        kernels: dict[str, Any] = dict.fromkeys(_DELTA_RULES, self._delta)
        kernels |= {_CONVOLUTION: self._convolve, _SCAN: self._scan}
        named = {**own.__globals__, **kernels}
        copied = FunctionType(own.__code__, named, own.__name__, own.__defaults__, own.__closure__)
        copied.__kwdefaults__ = own.__kwdefaults__
        return partial(copied, self.module, **self.cache)

    @property
    def _rows(self) -> StateRows:
        assert self.run.rows is not None
        return self.run.rows

    def _convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **named: object,
    ) -> torch.Tensor:
        """hidden_states [1, C, T] -> [1, C, T]."""
        _refuse_others(named)
        if activation not in (None, "silu", "swish"):
            raise UnservedModel(f"no kernel convolves with the activation {activation}")
        x, states = hidden_states[0].t().contiguous(), self.places[CONV, 0].tensor
        known: Literal["silu"] | None = None if activation is None else "silu"
        return causal_conv(x, weight, bias, states, self._rows, known).t()[None]

    def _delta(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **named: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, heads, ...] -> the outputs, and the states, which are written already."""
        _refuse_others(named)
        states = self.places[RECURRENT, 0].tensor
        out = gated_delta(
            query[0],
            key[0],
            value[0],
            g[0],
            beta[0],
            states,
            self._rows,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
        )
        return out[None], states

    def _scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **named: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_delta`. The kernel chooses its own chunk size."""
        _refuse_others(named)
        if not dt_softplus:
            raise UnservedModel("no kernel scans time steps that go through no softplus")
        states, gate = self.places[RECURRENT, 0].tensor, None if z is None else z[0]
        out = mamba2(
            hidden_states[0],
            dt[0],
            A,
            B[0],
            C[0],
            states,
            self._rows,
            D,
            gate,
            dt_bias,
            dt_limit,
        )
        return out[None], states


def wrap(module: torch.nn.Module, run: Run, cache: RunCache) -> MixerPort:
    """Replace the module's forward on this instance; its port has no places yet."""
    inner, name = module.forward, cache_argument(module.forward)
    names = list(inspect.signature(inner).parameters)[1:]
    cached = {} if name is None else {name: cache}
    port = MixerPort(run, module, inner, cached)

    def forward(hidden_states: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        named = {**dict(zip(names, args, strict=False)), **named, **cached}
        named.pop("attention_mask", None)
        return port.forward(hidden_states, named)

    module.forward = forward
    return port


def in_fastest_form(
    ports: Sequence[MixerPort], forms: Sequence[str], check: Callable[[], Result]
) -> Result:
    """Return what `check` returns for the first form that it accepts. Raises UnservedModel."""
    for form in forms:
        for port in ports:
            port.take_form(form)
        try:
            return check()
        except UnservedModel as error:
            if form == forms[-1]:
                raise
            logger.info("mixers %s: %s", form, error.message)
    raise AssertionError("no form")


def _refuse_others(named: Mapping[str, object]) -> None:
    """Raise UnservedModel for an argument that may change the result."""
    for name, value in named.items():
        if value is not None and name not in _OF_STATES:
            raise UnservedModel(f"its mixer passes {name}, which no kernel takes")


def _batches(step: HostStep) -> list[tuple[slice, list[int]]]:
    """Tokens and row numbers of rows that are computed together; single tokens come first."""
    num_single = sum(1 for count in step.counts if count == 1)
    batches = [(slice(0, num_single), list(step.numbers[:num_single]))] if num_single else []
    first = num_single
    for number, count in zip(step.numbers[num_single:], step.counts[num_single:], strict=True):
        batches.append((slice(first, first + count), [number]))
        first += count
    return batches
