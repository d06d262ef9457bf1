"""Multi-head latent attention, absorbed, and the indexers that choose keys for it.

Latents are kept, and queries are multiplied with them as they are.

Every such module of transformers keeps the latent and expands it in a method `expand_kv`. That is
replaced by one that returns its arguments, so the attention function sees latent and turned key.
An indexer's own forward scores and chooses, row by row, once the keys of all rows are written.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenmesh.engine.models.tree.attention import PORT
from tokenmesh.engine.models.tree.run import ModulePlace, Run, RunCache, UnservedModel
from tokenmesh.kernels.mla_attention import latent_write, mla_attention
from tokenmesh.kernels.paged_attention import DeviceRows, Prepared

_TAKES: Final = (
    *("hidden_states", "q_resid", "position_embeddings"),
    *("attention_mask", "position_ids", "past_key_values"),
)


@dataclass(frozen=True, slots=True)
class AnyMask:
    """It holds what an attention module slices for its indexer, which does not look at it here."""

    mask: object
    """As the module got it."""

    def __getitem__(self, _index: object) -> "AnyMask":
        return self


@dataclass(slots=True)
class IndexerPort:
    """One indexer; where its keys are is its module's PORT."""

    run: Run
    cache: RunCache
    module: Any
    inner: Any
    width: int = 0
    """Features of a key; the probe sees it."""
    _context: torch.Tensor | None = None
    """[1, context, D] of the row at work; None: keys of the step are written."""

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        """int32 [1, T, chosen]: positions of the row that each token is in; -1 is none."""
        named = {**dict(zip(_TAKES, given, strict=False)), **named}
        step, hidden = self.run.step, named["hidden_states"]
        self._context = None
        self._choose(named, slice(None), hidden.new_zeros(1, 1, 1))  # writes all keys
        if step is None:
            return torch.zeros(1, hidden.shape[1], 1, dtype=torch.int32, device=hidden.device)
        # a recorded step would have none; see `HfModel.takes_graphs`
        assert step.starts
        keys, device = getattr(self.module, PORT).tensor, hidden.device
        ends = [start + count for start, count in zip(step.starts, step.counts, strict=True)]
        shape = (1, hidden.shape[1], min(self.module.index_topk, max(ends)))
        chosen = torch.full(shape, -1, dtype=torch.int32, device=device)
        first = 0
        for start, end, table in zip(step.starts, ends, step.row_tables, strict=True):
            tokens = slice(first, first + end - start)
            first = tokens.stop
            blocks = table[: -(-end // keys.shape[1])].long()
            self._context = keys[blocks].flatten(0, 1)[None, :end]
            positions = torch.arange(start, end, device=device)[:, None]
            mask = torch.arange(end, device=device)[None] <= positions
            found = self._choose(named, tokens, mask[None])[0]
            chosen[0, tokens, : found.shape[-1]] = torch.where(found <= positions, found, -1)
        return chosen

    def _update(self, keys: torch.Tensor) -> torch.Tensor:
        if self._context is not None:
            return self._context
        self.width, step = int(keys.shape[-1]), self.run.step
        if step is not None:
            kept = getattr(self.module, PORT).tensor
            latent_write(keys[0].to(kept.dtype), kept, step.token_slots)
        return keys[:, :1]

    def _choose(self, named: dict[str, Any], tokens: slice, mask: torch.Tensor) -> torch.Tensor:
        cos, sin = named["position_embeddings"]
        self.run.index = self._update
        try:
            found: torch.Tensor = self.inner(
                named["hidden_states"][:, tokens],
                named["q_resid"][:, tokens],
                (cos[:, tokens], sin[:, tokens]),
                mask,
                None,
                past_key_values=self.cache,
            )
        finally:
            self.run.index = None
        return found


def wrap_indexer(module: torch.nn.Module, run: Run, cache: RunCache) -> IndexerPort:
    """Replace the module's forward on this instance. Raises UnservedModel for another form."""
    parameters = tuple(inspect.signature(module.forward).parameters)
    if parameters != _TAKES or not hasattr(module, "index_topk"):
        raise UnservedModel(f"{type(module).__name__} is an indexer of another form")
    port = IndexerPort(run, cache, module, module.forward)
    module.forward = port.forward
    return port


def is_latent(module: torch.nn.Module) -> bool:
    """Return whether a module attends over latents."""
    return hasattr(module, "expand_kv")


def keep_latents(module: torch.nn.Module) -> None:
    """Let its attention function see what it caches."""
    for name in ("kv_b_proj", "qk_nope_head_dim", "v_head_dim"):
        if not hasattr(module, name):
            raise UnservedModel(f"its latent attention has no {name}")
    module.expand_kv = _unchanged  # type: ignore[assignment]
    if getattr(module, "indexer", None) is None:
        return
    inner = module.forward

    def forward(*args: Any, attention_mask: object = None, **named: Any) -> Any:
        return inner(*args, attention_mask=AnyMask(attention_mask), **named)

    module.forward = forward


def _unchanged(latent: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, turned


def _positions(chosen: torch.Tensor, rows: Prepared | DeviceRows) -> torch.Tensor:
    """chosen [T, k] int32 in the type that `mla_attention` takes there."""
    return chosen.contiguous() if isinstance(rows, DeviceRows) else chosen.long()


@dataclass(slots=True)
class LatentPort:
    """One module's latents: a key is [latent, turned part], its value the latent."""

    place: ModulePlace
    module: Any
    _inward: torch.Tensor | None = None
    """[H, N, C] from queries to latents"""
    _outward: torch.Tensor | None = None
    """[H, C, V] from mixed latents to values"""

    def attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        turned: torch.Tensor,
        scale: float,
        _sinks: None = None,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [1, H, T, N + R], latent [1, 1, T, C], turned [1, 1, T, R] -> [1, T, H, V].

        chosen [1, T, k]: positions that each token attends to, -1 for none; None: all before it.
        """
        step, pages = self.place.run.step, self.place.tensor
        assert step is not None
        if self._inward is None or self._outward is None:
            self._inward, self._outward = self._take_weight(query.shape[1])
        heads, rank, nope = query.shape[1], latent.shape[-1], self.module.qk_nope_head_dim
        latents = torch.cat([latent[0, 0], turned[0, 0]], dim=-1)
        latent_write(latents, pages, step.token_slots, self.place.scale.key)
        absorbed = torch.matmul(query[0, ..., :nope], self._inward)
        absorbed = torch.cat([absorbed, query[0, ..., nope:]], dim=-1).transpose(0, 1)
        rows = step.attention(None, pages[None, :, None])
        indices = None if chosen is None else _positions(chosen[0], rows)
        mixed = mla_attention(
            absorbed.contiguous(),
            pages,
            rows,
            rank,
            scale,
            indices,
            page_scale=self.place.scale.key,
        )
        by_head = mixed.view(len(absorbed), heads, rank).transpose(0, 1)
        return torch.matmul(by_head, self._outward).transpose(0, 1)[None]

    def _take_weight(self, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both halves of each head's weight, contiguous: products would copy them at each step."""
        projection, nope = self.module.kv_b_proj, self.module.qk_nope_head_dim
        weight = projection.weight.detach().unflatten(0, (heads, -1))
        inward, outward = weight[:, :nope], weight[:, nope:].transpose(1, 2)
        empty = torch.empty_like(projection.weight, device="meta")
        projection.weight = torch.nn.Parameter(empty, requires_grad=False)
        return inward.contiguous(), outward.contiguous()
