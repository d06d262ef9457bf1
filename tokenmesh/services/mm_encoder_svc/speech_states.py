"""CausalStates: where a tower stands after a part of speech, so that the next part needs no other.

A tower of speech that goes on is causal: each part is encoded from the keys and values, and the
ends of convolutions, that the part before has left.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from tokenmesh.services.mm_encoder_svc.batcher import StateLost


@dataclass(frozen=True, slots=True)
class CausalState:
    """The state that transformers' causal tower returns besides its output."""

    keys: Any
    """A DynamicCache."""
    edges: Any
    """Its cache of what convolutions see before their first input."""

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        kept = [each for layer in self.keys.layers for each in (layer.keys, layer.values)]
        kept += [layer.cache for layer in self.edges.layers.values()]
        return sum(each.numel() * each.element_size() for each in kept)

    def fork(self) -> "CausalState":
        """One that may be changed; this one stays as it is."""
        keys, edges = copy.copy(self.keys), copy.copy(self.edges)
        keys.layers = [copy.copy(layer) for layer in self.keys.layers]
        edges.layers = {name: copy.copy(layer) for name, layer in self.edges.layers.items()}
        for layer in edges.layers.values():
            layer.cache = layer.cache.clone()  # which is changed in place
        return CausalState(keys, edges)


class CausalStates:
    """By the content hash of the last part; the least recently used leave first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._states: OrderedDict[str, CausalState] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._states)

    def after(self, part: str) -> CausalState:
        """The state to go on from, which the caller may change. Raises StateLost."""
        state = self._states.get(part)
        if state is None:
            raise StateLost("the tower's state after the part before is gone")
        return state.fork()

    def replace(self, before: str, part: str, state: CausalState) -> None:
        """Keep the state after `part` in place of that after `before`, if it fits."""
        for name in (before, part):
            old = self._states.pop(name, None)
            self._num_bytes -= 0 if old is None else old.num_bytes
        if state.num_bytes > self._max_bytes:
            return
        self._states[part] = state
        self._num_bytes += state.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._states.popitem(last=False)
            self._num_bytes -= oldest.num_bytes


@torch.inference_mode()
def encode_part(
    model: Any, input_features: torch.Tensor, state: CausalState | None
) -> tuple[torch.Tensor, CausalState]:
    """Embeddings [n, width] of the next frames [1, bins, frames], and the state after them.

    `state` is changed; None: the speech begins.
    """
    found = model.get_audio_features(
        input_features,
        past_key_values=None if state is None else state.keys,
        padding_cache=None if state is None else state.edges,
        use_cache=True,
        return_dict=True,
    )
    return found.pooler_output[0], CausalState(found.past_key_values, found.padding_cache)
