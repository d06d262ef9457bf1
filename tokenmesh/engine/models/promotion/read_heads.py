"""Tell how an attention module makes queries and keys, found by trying what the native kind
does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import torch

from tokenmesh.engine.layers.rotary import Rotary
from tokenmesh.engine.models.native.config import QkNorm
from tokenmesh.engine.models.tree.attention import Port
from tokenmesh.engine.models.tree.recognise import Norm, is_same
from tokenmesh.kernels.rms_norm import rms_norm
from tokenmesh.kernels.rope import interleave_rows, rotate


class Unread(Exception):
    """A tree cannot be read as a native decoder; the message names the first part that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """It says how queries and keys are made."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: tuple[str, ...]
    """One projection for each, or one for all."""
    qk_norm: QkNorm
    norms: tuple[str, ...]
    """The norms of queries and of keys; empty without norms."""
    norms_after_rope: bool
    rope: int | None
    """Index of the rope among the tree's; None: no positions."""
    is_interleaved: bool
    scale: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class Spy:
    """Replaces an attention module's port for one pass, and records what it is called with."""

    port: Port
    given: tuple[torch.Tensor, ...] = ()
    scale: float = 1.0
    sinks: torch.Tensor | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self.given, self.scale = (query.clone(), key.clone(), value.clone()), scale
        self.sinks = sinks
        return self.port.attend(query, key, value, scale, sinks)


@dataclass(frozen=True, slots=True)
class Ropes:
    """The ropes of a tree, at the positions of the pass."""

    positions: torch.Tensor
    rotaries: Sequence[Rotary]

    def turned(self, heads: torch.Tensor, rope: int, is_interleaved: bool) -> torch.Tensor:
        """heads [T, H, D] in the checkpoint's order of features, rotated, in that order."""
        rotary = self.rotaries[rope]
        features, dim = torch.arange(heads.shape[-1]), rotary.config.rotary_dim
        order = features if is_interleaved else interleave_rows(features, len(features), dim)
        pairs = heads[..., order].contiguous()
        rotate(pairs, rotary.turns(self.positions, self.positions + 1))
        out = torch.empty_like(pairs)
        out[..., order] = pairs
        return out


@dataclass(frozen=True, slots=True)
class _Way:
    """One candidate for norms and rope of queries and keys."""

    norms: tuple[str, ...]
    kind: QkNorm
    norms_after_rope: bool
    rope: int | None
    is_interleaved: bool

    def apply(self, heads: torch.Tensor, norm: Norm | None, ropes: Ropes) -> torch.Tensor:
        """heads [T, H, D], a new tensor."""
        if norm is not None and not self.norms_after_rope:
            heads = self._normed(heads, norm)
        if self.rope is not None:
            heads = ropes.turned(heads, self.rope, self.is_interleaved)
        if norm is not None and self.norms_after_rope:
            heads = self._normed(heads, norm)
        return heads

    def _normed(self, heads: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self.kind == "head":
            return rms_norm(heads, norm.weight, norm.eps)
        return rms_norm(heads.flatten(1), norm.weight, norm.eps).view(heads.shape)


def read_heads(
    projections: dict[str, torch.Tensor], norms: dict[str, Norm], spy: Spy, ropes: Ropes
) -> Heads:
    """projections: results [1, T, O] by name. Raises Unread."""
    query, key, value = (each[0].transpose(0, 1) for each in spy.given)
    if value.shape != key.shape:
        raise Unread("its values are not as wide as its keys")
    softcap = spy.port.softcap
    if softcap is not None and not softcap > 0:
        raise Unread(f"its attention has a softcap of {softcap}")
    for names in _orders(projections):
        made = torch.cat([projections[name][0] for name in names], dim=-1)
        sizes = [each[0].numel() for each in (query, key, value)]
        if made.shape[1] != sum(sizes):
            raise Unread("its projections are not queries, keys and values")
        parts = [
            part.reshape(given.shape)
            for part, given in zip(torch.split(made, sizes, -1), (query, key, value), strict=True)
        ]
        if not is_same(value, parts[2]):
            continue
        for way in _ways(norms, query, key, len(ropes.rotaries)):
            pair = [norms.get(name) for name in way.norms or ("", "")]
            ours = [way.apply(*each, ropes) for each in zip(parts[:2], pair, strict=True)]
            if is_same(query, ours[0]) and is_same(key, ours[1]):
                return Heads(
                    num_heads=query.shape[1],
                    num_kv_heads=key.shape[1],
                    head_dim=query.shape[2],
                    qkv=names,
                    qk_norm=way.kind,
                    norms=way.norms,
                    norms_after_rope=way.norms_after_rope,
                    rope=way.rope,
                    is_interleaved=way.is_interleaved,
                    scale=spy.scale,
                    window=spy.port.window,
                    softcap=softcap,
                )
    raise Unread("its queries and keys are made in an unsupported way")


def _orders(projections: dict[str, torch.Tensor]) -> Iterator[tuple[str, ...]]:
    if len(projections) not in (1, 3):
        raise Unread(f"its attention has {len(projections)} projections of its input")
    yield from permutations(projections)


def _ways(
    norms: dict[str, Norm], query: torch.Tensor, key: torch.Tensor, num_ropes: int
) -> Iterator[_Way]:
    ropes = [(None, False), *product(range(num_ropes), (False, True))]
    if not norms:
        yield from (_Way((), "none", False, *rope) for rope in ropes)
        return
    if len(norms) != 2:
        raise Unread(f"its attention has {len(norms)} norms")
    for names in permutations(norms):
        widths = [len(norms[name].weight) for name in names]
        if widths == [query.shape[2], key.shape[2]]:
            yield from (_Way(names, "head", a, *r) for a, r in product((False, True), ropes))
        elif widths == [query[0].numel(), key[0].numel()]:
            yield from (_Way(names, "all", False, *rope) for rope in ropes)
