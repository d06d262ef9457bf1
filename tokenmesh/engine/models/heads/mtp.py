"""MtpHead: the layer behind a model's last one that was trained with it to predict further tokens.

Shapes: T tokens, N rows that need logits, H the hidden size, V the vocabulary.
"""

from dataclasses import dataclass

import torch

from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.keeps import Grouping, LayerKeeps
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.kernels.linear import Linear, linear
from tokenmesh.kernels.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A head from the model's own checkpoint. Implements `DraftModel`.

    Embeddings and the projection to logits are the model's.
    """

    target: LanguageModel
    layer: LanguageModel
    """One layer without a norm behind it, whose embeddings and logits are not used."""
    token_norm: torch.Tensor
    state_norm: torch.Tensor
    merge: Linear
    """[token | state], both normalized -> H."""
    norm: torch.Tensor
    """Makes what logits are computed from."""
    eps: float
    hands_on_normed: bool
    """The next token's state is what logits are computed from; else it is the layer's output."""
    position_rows: int
    shift: int = 1
    taps: tuple[int, ...] = ()

    @property
    def max_position(self) -> int:
        return self.target.facts.max_position

    @property
    def vocab_size(self) -> int:
        return self.target.facts.vocab_size

    @property
    def keeps(self) -> tuple[LayerKeeps, ...]:
        return self.layer.keeps

    @property
    def grouping(self) -> Grouping:
        return self.layer.grouping

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    def states(self, hidden: torch.Tensor, taps: torch.Tensor | None) -> torch.Tensor:
        return hidden

    def embed(self, token_ids: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        assert states is not None
        tokens = rms_norm(self.target.embed(token_ids), self.token_norm, self.eps)
        normed = rms_norm(states.contiguous(), self.state_norm, self.eps)
        return linear(torch.cat([tokens, normed], dim=-1), self.merge)

    def forward(self, hidden: torch.Tensor, step: HostStep, store: KvStore) -> torch.Tensor:
        out = self.layer.forward(hidden, step, store)
        return rms_norm(out, self.norm, self.eps) if self.hands_on_normed else out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.hands_on_normed:
            hidden = rms_norm(hidden, self.norm, self.eps)
        return self.target.logits(hidden)
