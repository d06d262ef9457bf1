"""Ropes whose angles depend on the length of a sequence, by row.

transformers chooses them by the longest position of the whole batch, which would let the rows of a
step change each other's numbers.
"""

from typing import Any, Final

import torch

from tokenmesh.services.worker_svc.layers.rope_config import RopeConfig
from tokenmesh.services.worker_svc.layers.rotary import Rotary
from tokenmesh.services.worker_svc.models.hf.run import Run
from tokenmesh.services.worker_svc.models.hf.unserved import UnservedModel
from tokenmesh.services.worker_svc.models.native.read_rope import RopeRules, read_ropes
from tokenmesh.services.worker_svc.models.raw_config import RawConfig

_BY_LENGTH: Final = ("dynamic", "longrope")


def length_ropes(raw: RawConfig, text: Any, tree: torch.nn.Module) -> tuple[RopeConfig, ...]:
    """The rope of a tree if it is of such a kind, else none. text is the text config."""
    kinds = [getattr(module, "rope_type", None) for module in tree.modules()]
    if any(set(kind.values()) & set(_BY_LENGTH) for kind in kinds if isinstance(kind, dict)):
        raise UnservedModel(f"its ropes by layer type include one of {', '.join(_BY_LENGTH)}")
    if not any(kind in _BY_LENGTH for kind in kinds if isinstance(kind, str)):
        return ()
    parameters = text.rope_parameters
    values = {**text.to_dict(), "rope_scaling": None, "rope_parameters": parameters}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rules = RopeRules(default_is_partial=True)
    return read_ropes(RawConfig(values, raw.origin), rules, head_dim)


class RowRope(torch.nn.Module):
    """Takes the place of a tree's rotary module."""

    def __init__(self, rope: RopeConfig, run: Run, device: torch.device) -> None:
        """device: where positions will be."""
        super().__init__()
        self.rotary = Rotary(rope, None if device.type == "meta" else device)
        self._run = run

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [1, T, *], position_ids [1, T] -> cos and sin [1, T, rotary_dim] in x's dtype."""
        if position_ids.is_meta:  # the probe of a tree without weights
            shape = (*position_ids.shape, self.rotary.config.rotary_dim)
            return x.new_empty(shape), x.new_empty(shape)
        step, positions = self._run.step, position_ids[0]
        lengths = positions + 1 if step is None else step.lengths
        turns = self.rotary.turns(positions, lengths)[:, 0]
        both = torch.cat([turns, turns], dim=-1)[None]
        return both.real.to(x.dtype), both.imag.to(x.dtype)


def by_row(body: torch.nn.Module, ropes: tuple[RopeConfig, ...], run: Run) -> None:
    """Put a RowRope where the tree has a rotary module of such a kind. Raises UnservedModel."""
    for parent in body.modules():
        for name, module in parent.named_children():
            if getattr(module, "rope_type", None) in _BY_LENGTH:
                like = next(body.parameters())
                rope = RowRope(ropes[0], run, like.device)
                _compare(module, rope, like)
                setattr(parent, name, rope)


def _compare(module: Any, rope: RowRope, like: torch.Tensor) -> None:
    """A short and a long sequence: their last tokens are turned as the tree's module turns them."""
    for last in () if like.is_meta else (1, 2 * module.config.max_position_embeddings):
        positions = torch.tensor([[0, last]], device=like.device)
        for own, ours in zip(module(like, positions), rope(like, positions), strict=True):
            if not torch.allclose(own[0, -1], ours[0, -1], atol=1e-2):
                raise UnservedModel("its rope depends on the length in a way of its own")
