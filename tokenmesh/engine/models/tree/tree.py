"""Tree: transformers' module tree of a checkpoint, with our attention and cache under it.

Ropes whose angles depend on the length of a sequence are replaced: transformers chooses them by the
longest position of the batch, which would let the rows of a step change each other's numbers.
"""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tokenmesh.engine.layers.rotary import RopeConfig, Rotary
from tokenmesh.engine.models.keeps import LayerKeeps
from tokenmesh.engine.models.native.read_rope import RopeRules, read_ropes
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.engine.models.tree import experts
from tokenmesh.engine.models.tree.attention import ATTENTION
from tokenmesh.engine.models.tree.media.cross import CrossPort, wrap_cross
from tokenmesh.engine.models.tree.media.language import language_body
from tokenmesh.engine.models.tree.mixers import MixerPort, calls, wrap
from tokenmesh.engine.models.tree.mla import (
    IndexerPort,
    is_latent,
    keep_latents,
    wrap_indexer,
)
from tokenmesh.engine.models.tree.probe import PROBE, probe
from tokenmesh.engine.models.tree.run import (
    Run,
    RunCache,
    UnservedModel,
    cache_argument,
)

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
                _check_form(module, rope)
                _compare(module, rope, like)
                setattr(parent, name, rope)


def _check_form(module: Any, rope: RowRope) -> None:
    """Raise UnservedModel unless the tree's module, too, returns cosines and sines of each number.

    It is made again, as one without memory cannot look at the positions.
    """
    out = type(module)(module.config)(torch.empty(1), torch.zeros(1, 1, dtype=torch.long))
    parts = out if isinstance(out, tuple) else (out,)
    if [each.shape[-1] for each in parts] != [rope.rotary.config.rotary_dim] * 2:
        kind, name = module.rope_type, type(module).__name__
        raise UnservedModel(f"its rope depends on the length ({kind}) and {name} has its own form")


def _compare(module: Any, rope: RowRope, like: torch.Tensor) -> None:
    """A short and a long sequence: their last tokens are turned as the tree's module turns them."""
    x = torch.empty(1, dtype=torch.float32, device=like.device)
    for last in () if like.is_meta else (1, 2 * module.config.max_position_embeddings):
        positions = torch.tensor([[0, last]], device=like.device)
        own, ours = (torch.stack(each(x, positions))[:, 0, -1] for each in (module, rope))
        # angles of large positions lose digits, what both are multiplied by does not
        has_size = torch.allclose(own.norm(dim=0), ours.norm(dim=0), rtol=1e-4)
        if not has_size or not torch.allclose(own, ours, atol=1e-2):
            raise UnservedModel("its rope depends on the length in an unsupported way")


logger = logging.getLogger(__name__)
_PROBE_TOKENS = 3


@dataclass(slots=True)
class Tree:
    """A tree of transformers, adapted. Its weights may still be on the meta device."""

    model: PreTrainedModel
    shell: torch.nn.Module
    """The model without its head, which places media in a prompt."""
    body: torch.nn.Module
    """The language model without its head: all of `shell`, or a part of it."""
    embedding: torch.nn.Module
    run: Run
    cache: dict[str, RunCache]
    """By the name of the body's argument."""
    mixers: list[MixerPort]
    indexers: list[IndexerPort]
    crosses: list[CrossPort]
    embedding_factor: float = 1.0
    """It holds what its own code multiplies embeddings by where it makes them; see
    `embedding_factor`."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> embeddings [T, H], as its own code gives them to the first layer."""
        embeddings: torch.Tensor = self.embedding(token_ids)
        return embeddings if self.embedding_factor == 1.0 else embeddings * self.embedding_factor

    def hidden_of(
        self, embeddings: torch.Tensor, positions: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        """embeddings [1, T, H], positions [1, T] or [rows, 1, T] -> final hidden states [1, T, H].

        more: what only this tree takes, by the names of its arguments."""
        named = {"inputs_embeds": embeddings, "position_ids": positions, **self.cache, **more}
        out = self.body(use_cache=True, **named)
        return out.last_hidden_state  # type: ignore[no-any-return]

    def probe(self) -> tuple[LayerKeeps, ...]:
        """Attach every port; what the layers keep. Raises UnservedModel."""
        device = next(self.body.parameters()).device
        table: Any = self.embedding.weight
        shape = (1, _PROBE_TOKENS, table.shape[-1])
        embeddings = torch.empty(shape, device=device, dtype=self.model.dtype)
        positions = torch.arange(_PROBE_TOKENS, device=device)[None]
        self._run_by(PROBE, PROBE)
        try:
            forward = partial(self.hidden_of, embeddings, positions)
            return probe(self.run, self.mixers, self.indexers, self.crosses, forward)
        except UnservedModel:
            raise
        except Exception as error:
            logger.info("the probe failed", exc_info=error)
            raise UnservedModel(_reason_of(error)) from error
        finally:
            self._run_by(ATTENTION, experts.NAME)

    def _run_by(self, attention: str, experts_name: str) -> None:
        """Name the functions to every module: each reads its own config object."""
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                config._attn_implementation = attention
                config._experts_implementation = experts_name


def adapt(model: PreTrainedModel, ropes: tuple[RopeConfig, ...] = ()) -> Tree:
    """Replace what touches the cache. Raises UnservedModel."""
    run = Run()
    cache = RunCache(run)
    mixers, indexers = [], []
    for module in model.modules():
        if calls(module, "update_conv_state"):
            mixers.append(wrap(module, run, cache))
        elif calls(module, "update_indexer"):
            indexers.append(wrap_indexer(module, run, cache))
        elif is_latent(module):
            keep_latents(module)
    body = language_body(model)
    by_row(body, ropes, run)
    crosses = wrap_cross(body, run)
    embedding = model.get_input_embeddings()
    name = cache_argument(body.forward)
    if name is None:
        raise UnservedModel("its code in transformers has no cache")
    parts = (model, model.base_model, body, embedding)
    return Tree(*parts, run, {name: cache}, mixers, indexers, crosses)


def _reason_of(error: Exception) -> str:
    """Why a pass without weights failed, with the class whose code it was in."""
    module, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        module = owner if isinstance(owner, torch.nn.Module) else module
        trace = trace.tb_next
    where = "its code" if module is None else f"the code of {type(module).__name__}"
    if "meta tensor" in str(error):
        return f"{where} reads numbers off tensors, which a pass without weights cannot follow"
    return f"{where} fails over a paged cache: {error}"
