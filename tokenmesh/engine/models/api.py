"""Define what every kind of model offers the runner: facts, what its layers keep, embed, forward,
logits.

Shapes: T tokens of the step, N rows that need logits, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from tokenmesh.engine.adapters.sites import AdapterSites
from tokenmesh.engine.api.media import MediaItem
from tokenmesh.engine.layers.rotary import RopeConfig
from tokenmesh.engine.layers.step import Patch, Step
from tokenmesh.engine.media_facts import TEXT_ONLY, MediaFacts
from tokenmesh.engine.models.extra_layers import is_extra
from tokenmesh.engine.models.keeps import Grouping, LayerKeeps
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.quantization import Quantization
from tokenmesh.kernels.alignment import MULTIPLE
from tokenmesh.kernels.linear.formats.round import Rounding

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) while weights are read."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """It holds what config.json says of a checkpoint, before its weights are read."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    """Longest sequence the checkpoint was made for, rope scaling included."""
    ropes: tuple[RopeConfig, ...]
    """All ropes whose angles depend on a sequence's length, and maybe others."""
    dtype: str | None
    """As the checkpoint states it, such as "bfloat16"."""
    encoder_states: int = field(default=0, kw_only=True)
    """States [*, hidden] of an encoder that every prompt attends to; 0: none."""
    quantization: Quantization | None = field(default=None, kw_only=True)
    """It says how its weights are stored; None: plainly."""
    rounding: Rounding | None = field(default=None, kw_only=True)
    """It holds what plain weights are rounded to when they are loaded."""
    media: MediaFacts = field(default=TEXT_ONLY, kw_only=True)
    extra_layers: range = field(default=range(0), kw_only=True)
    """Numbers of layers that predict further tokens, which are not read."""

    def is_extra(self, name: str) -> bool:
        """Return whether a tensor is of one of them."""
        return is_extra(name, self.extra_layers)

    @property
    def weight_format(self) -> str:
        """Return how its weights are kept: a method of quantization, else the checkpoint's type."""
        method = None if self.quantization is None else self.quantization.method
        return self.rounding or method or self.dtype or "float32"

    @property
    def rope_boundary(self) -> int | None:
        """Sequences that grow past this length compute all of their keys again."""
        return next((rope.boundary for rope in self.ropes if rope.boundary is not None), None)

    def gpu_problem(self) -> str | None:
        """Why the model does not run on a GPU; None: nothing in its config prevents it."""
        return None

    def min_length(self, num_prompt: int, num_known: int) -> int:
        """The sequence length to compute a row's first tokens with, where keys depend on it.

        num_known tokens are known when its KV is computed from the start. Past a boundary every key
        is one of the whole sequence; else an output token's is that of the length it made.
        """
        return num_prompt if self.rope_boundary is None else num_known

    def cache_salt(self, salt: str | None, num_prompt: int) -> str | None:
        """The prefix cache's salt: the client's, extended where keys depend on the length."""
        for rope in self.ropes:
            salt = rope.cache_salt(salt, num_prompt)
        return salt


def heads_problem(width: int) -> str | None:
    """Why heads of this width do not run on a GPU; None: they do."""
    if width % MULTIPLE == 0:
        return None
    return f"heads of {width} features do not run on a GPU: no multiple of {MULTIPLE}"


CrossWriter = Callable[[torch.Tensor, KvStore, int], None]
"""Writes what a row's cross attention reads: the encoder's states [encoder_states, hidden], the
store, the row's number."""


class Aligner(Protocol):
    """Finds where in a recording the tokens of a transcript are, while it is a row's prompt."""

    def begin(self, row: int, first: int, num_states: int) -> None:
        """Before the prompt's first token: the transcript begins at token `first` of it."""

    def drop(self, row: int) -> None:
        """The row has ended; nothing happens for one that is not aligned."""

    def take(self, row: int) -> list[int] | None:
        """See `Delta.alignment`, once the prompt is computed; None for one that is not aligned."""


class Taps(NamedTuple):
    """Hidden states within the layers, for a head that reads them."""

    layers: tuple[int, ...]
    """They are the inputs of these layers."""
    states: torch.Tensor
    """[T, layers, hidden], which `forward` writes."""


class LanguageModel(Protocol):
    """All weights of a model, ready to run. Only the compute thread calls it."""

    @property
    def facts(self) -> ModelFacts:
        """Sizes, as config.json says them."""

    @property
    def keeps(self) -> tuple[LayerKeeps, ...]:
        """Return what each layer keeps between steps."""

    @property
    def sites(self) -> AdapterSites:
        """The linear layers that adapters may change."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of weights, activations and pages."""

    @property
    def grouping(self) -> Grouping:
        """Return which layers share a block table."""

    @property
    def write_cross(self) -> CrossWriter | None:
        """None: it has no cross attention."""

    @property
    def aligner(self) -> Aligner | None:
        """None: no heads of its cross attention are known to follow the speech."""

    @property
    def has_program(self) -> bool:
        """Return whether C kernels run all layers, which makes results independent of the batch."""

    @property
    def num_tap_layers(self) -> int:
        """Layers whose inputs `forward` can show; 0: of none."""

    @property
    def takes_graphs(self) -> bool:
        """Return whether its steps can be recorded into CUDA graphs: no step reads from the
        host.
        """

    def embed(self, token_ids: torch.Tensor, patches: Sequence[Patch] = ()) -> torch.Tensor:
        """token_ids [T] -> [T, hidden], a new tensor with the patches in it."""

    def positions_of(
        self, token_ids: Sequence[int], media: Sequence[MediaItem]
    ) -> torch.Tensor | None:
        """Positions [rows, T] of a prompt's tokens, int64 or, of some models, float32.

        None: they count from 0 in every row.

        Positions of output tokens count on from the greatest of them. Raises ValueError for media
        whose grids do not fit the prompt.
        """

    def forward(
        self, hidden: torch.Tensor, step: Step, store: KvStore, taps: Taps | None = None
    ) -> torch.Tensor:
        """Run layers and final norm over embeddings [T, hidden], which may be overwritten; fill
        the states of `taps`."""

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [N, hidden] after `forward` -> float32 [N, V]: `out`, or a new tensor."""
