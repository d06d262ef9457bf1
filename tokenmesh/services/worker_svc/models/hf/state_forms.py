"""FlatMixer: a mixer with a state over all rows of a step at once.

Transformers' mixers call their convolution and their recurrence as globals of `forward`. A copy of
`forward` gets others there: kernels that take flat tokens and know whose state is where. All else,
projections, gates, norms, remains the module's own: no family needs code here.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import torch

from tokenmesh.kernels.causal_conv import causal_conv
from tokenmesh.kernels.gated_delta import gated_delta
from tokenmesh.kernels.mamba2 import mamba2
from tokenmesh.kernels.state_rows import StateRows
from tokenmesh.services.worker_svc.models.hf.run import UnservedModel, cache_argument

_CONVOLUTION: Final = "causal_conv1d_fn"
_DELTA_RULES: Final = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_SCAN: Final = "mamba2_chunk_scan"
_RECURRENCES: Final = frozenset({*_DELTA_RULES, _SCAN})
_OF_STATES: Final = frozenset({"output_final_state", "return_final_states", "chunk_size"})
"""Arguments that change neither outputs nor states."""


@dataclass(frozen=True, slots=True)
class MixerStates:
    """One layer's states and the rows at work."""

    rows: StateRows
    conv: torch.Tensor
    """[slots, channels, width], in the dtype of the activations"""
    recurrent: torch.Tensor | None
    """[slots, ...] float32; None: the mixer has a convolution only"""


def has_flat_form(kind: type[torch.nn.Module]) -> bool:
    """Whether all that `kind` does with its states is what the kernels do.

    Not so for mixers of the first Mamba: their recurrence is another one.
    """
    names = set(_forward_of(kind).__code__.co_names)
    return _CONVOLUTION in names and (
        "update_recurrent_state" not in names or bool(names & _RECURRENCES)
    )


class FlatMixer:
    """Runs a mixer on flat tokens. Only the compute thread uses it."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Raises ValueError for a module without such a form."""
        kind = type(module)
        if not has_flat_form(kind):
            raise ValueError(f"{kind.__name__} keeps a state that no kernel computes")
        self._module = module
        self._states: MixerStates | None = None
        inner = _forward_of(kind)
        replaced: dict[str, Callable[..., Any]] = {_CONVOLUTION: self._convolve, _SCAN: self._scan}
        replaced.update(dict.fromkeys(_DELTA_RULES, self._delta))
        self._forward = FunctionType(
            inner.__code__,
            {**inner.__globals__, **replaced},
            inner.__name__,
            inner.__defaults__,
            inner.__closure__,
        )
        self._forward.__kwdefaults__ = inner.__kwdefaults__
        cache_name = cache_argument(inner)
        assert cache_name is not None
        self._cache_name = cache_name

    def __call__(self, hidden: torch.Tensor, states: MixerStates) -> torch.Tensor:
        """hidden [T, H] -> [T, H]; the rows' states are those after their last token."""
        self._states = states
        try:
            cache = {self._cache_name: _NO_STATES}
            mixed: torch.Tensor = self._forward(self._module, hidden[None], **cache)
        finally:
            self._states = None
        return mixed[0]

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
        assert self._states is not None
        out = causal_conv(
            hidden_states[0].t().contiguous(),
            weight,
            bias,
            self._states.conv,
            self._states.rows,
            None if activation is None else "silu",
        )
        return out.t()[None]

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
        assert self._states is not None
        assert self._states.recurrent is not None
        out = gated_delta(
            query[0],
            key[0],
            value[0],
            g[0],
            beta[0],
            self._states.recurrent,
            self._states.rows,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
        )
        return out[None], self._states.recurrent

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
        assert self._states is not None
        assert self._states.recurrent is not None
        out = mamba2(
            hidden_states[0],
            dt[0],
            A,
            B[0],
            C[0],
            self._states.recurrent,
            self._states.rows,
            D,
            None if z is None else z[0],
            dt_bias,
            dt_limit,
        )
        return out[None], self._states.recurrent


def _refuse_others(named: Mapping[str, object]) -> None:
    """Raise UnservedModel for an argument that may change the result."""
    for name, value in named.items():
        if value is not None and name not in _OF_STATES:
            raise UnservedModel(f"its mixer passes {name}, which no kernel takes")


class _NoStates:
    """The cache given to a mixer, to which every step looks like the first of one prompt."""

    def get_conv_state(self, *_args: object, **_named: object) -> None: ...

    def get_recurrent_state(self, *_args: object, **_named: object) -> None: ...

    def is_recording_past(self, _layer: int) -> bool:
        """States are never rolled back here."""
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, *_args: object, **_named: object
    ) -> torch.Tensor:
        """The inputs alone: the kernel puts each row's state before them."""
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, *_args: object, **_named: object
    ) -> torch.Tensor:
        return recurrent_states


_NO_STATES: Final = _NoStates()


def _forward_of(kind: type[torch.nn.Module]) -> FunctionType:
    forward = inspect.unwrap(kind.forward)
    assert isinstance(forward, FunctionType)
    return forward
