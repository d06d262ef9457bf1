"""Define what the modules of one tree see of the step at work: `Run`, places in the store, the
cache.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from transformers.cache_utils import Cache

from tokenmesh.engine.layers.step import Step
from tokenmesh.engine.models.alignment import RowAlignments
from tokenmesh.engine.models.kv_store import KvScale, KvStore
from tokenmesh.kernels.native import PagedAttention
from tokenmesh.kernels.state_rows import StateRows
from tokenmesh.shared.errors import CheckpointError

CONV: Final = "conv"
RECURRENT: Final = "recurrent"
"""The kinds of states that transformers' caches know."""
StateKey = tuple[str, int]
"""Kind and index of a state within its module."""


class UnservedModel(CheckpointError):
    """Its message completes "ARCHITECTURE cannot be served: "."""


def cache_argument(forward: Callable[..., object]) -> str | None:
    """The name by which `forward` takes a cache; None: it takes none."""
    parameters = inspect.signature(forward).parameters
    names = ("past_key_values", "cache_params", "past_key_value")
    return next((name for name in names if name in parameters), None)


@dataclass(slots=True)
class Run:
    """One for each model; set before each forward pass. Only the compute thread uses it."""

    step: Step | None = None
    store: KvStore | None = None
    states: dict[StateKey, torch.Tensor] = field(default_factory=dict)
    """Those [n, ...] of the rows that a mixer computes now through its own forward."""
    rows: StateRows | None = None
    """The rows that a mixer computes now by kernels, which read and write states themselves."""
    index: Callable[[torch.Tensor], torch.Tensor] | None = None
    """This is the function of the indexer at work: keys [1, n, D] of its tokens -> those they are
    scored against."""
    cached_layers: set[int] = field(default_factory=set)
    """Layers that gave keys and values to the cache."""
    attention: PagedAttention = field(default_factory=PagedAttention)
    alignments: RowAlignments | None = None
    """These are the alignments of rows whose transcripts are aligned; None: the model has no heads
    for it."""

    def begin(self, step: Step, store: KvStore) -> None:
        """Before a forward pass."""
        self.step, self.store = step, store

    def end(self) -> None:
        """After it: nothing of a step outlives it here."""
        self.step = self.store = None


@dataclass(slots=True)
class ModulePlace:
    """Where one module's memory is in the store."""

    run: Run
    layer: int
    item: int

    @property
    def store(self) -> KvStore:
        """The store at work."""
        assert self.run.store is not None
        return self.run.store

    @property
    def tensor(self) -> torch.Tensor:
        """The layer's tensor, see `KvStore.layers`."""
        return self.store.layers[self.layer][self.item]

    @property
    def scale(self) -> KvScale:
        """Return the scale of the layer's pages."""
        return self.store.scale_of(self.layer)

    @property
    def group(self) -> int:
        """The layer's KV group."""
        return self.store.grouping.group_of[self.layer]


class RunCache(Cache):  # type: ignore[misc]
    """Keys and values pass through to the attention function, which writes them to pages.

    States are those of the rows at work, which `mixers` puts into the run. All else of a cache
    works on its `layers`, which a paged store does not have.
    """

    is_sliding = is_linear = is_dummy = (False,)
    """By layer: no tokens are dropped by this object."""
    is_compileable = False

    def __init__(self, run: Run) -> None:
        self._run = run

    def __len__(self) -> int:
        return 1 << 30

    @property
    def layers(self) -> NoReturn:
        """Refused: there are none."""
        what = "its code uses the cache's layers, which a paged store does not have"
        raise UnservedModel(what)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_args: Any, **_named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was given: the new tokens' keys and values alone."""
        self._run.cached_layers.add(layer_idx)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given for each token; nothing may be derived from a length."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the sizes of a mask over the step alone; only the probe makes masks."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """States are never rolled back here."""
        return False

    def has_previous_state(self, *_args: Any, **_named: Any) -> bool:
        """Always: a new row's state is zero, which is what no state means."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[rows at work, channels, width]; None for the probe, and where kernels read it."""
        return self._run.states.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[rows at work, ...]; None as above."""
        return self._run.states.get((RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_named: Any,
    ) -> torch.Tensor:
        """The state and the new inputs after it; its last ones are the new state."""
        if self._run.rows is not None:
            return conv_states
        key = (CONV, state_idx)
        state = self._run.states.get(key)
        if state is None:
            width = conv_kernel_size or conv_states.shape[-1]
            state = conv_states.new_zeros(*conv_states.shape[:-1], width)
        whole = torch.cat([state, conv_states], dim=-1)
        self._run.states[key] = whole[..., -state.shape[-1] :]
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_named: Any
    ) -> torch.Tensor:
        """Keep the new state."""
        if self._run.rows is None:
            self._run.states[RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        assert self._run.index is not None, "called by indexers only, see `IndexerPort`"
        return self._run.index(keys)
