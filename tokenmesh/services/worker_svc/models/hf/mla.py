"""Multi-head latent attention, absorbed: latents are kept, and queries meet them as they are.

Every such module of transformers keeps the latent and expands it in a method `expand_kv`. That is
replaced by one that returns its arguments, so the attention function sees latent and turned key.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tokenmesh.kernels.kv_write import kv_write
from tokenmesh.kernels.paged_attention import paged_attention
from tokenmesh.services.worker_svc.layers.step import HostStep
from tokenmesh.services.worker_svc.models.hf.attention import padded
from tokenmesh.services.worker_svc.models.hf.indexer import AnyMask
from tokenmesh.services.worker_svc.models.hf.run import Place
from tokenmesh.services.worker_svc.models.hf.unserved import UnservedModel


def is_latent(module: torch.nn.Module) -> bool:
    """Whether a module attends over latents."""
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

    module.forward = forward  # type: ignore[method-assign]


def _unchanged(latent: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, turned


@dataclass(frozen=True, slots=True)
class LatentPort:
    """One module's latents: a key is [latent, turned part], its value the latent."""

    place: Place
    module: Any

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
        heads, rank, nope = query.shape[1], latent.shape[-1], self.module.qk_nope_head_dim
        key = torch.cat([latent[0], turned[0]], dim=-1)
        keys_values = torch.cat([key, padded(latent[0], pages)]).transpose(0, 1)
        kv_write(keys_values.contiguous(), pages, step.slots(pages))
        weight = self.module.kv_b_proj.weight.view(heads, -1, rank)
        absorbed = torch.matmul(query[0, ..., :nope], weight[:, :nope])
        absorbed = torch.cat([absorbed, query[0, ..., nope:]], dim=-1).transpose(0, 1)
        absorbed = absorbed.contiguous()
        if chosen is None:
            mixed = paged_attention(absorbed, pages, step.attention(None, pages), scale)
        else:
            assert isinstance(step, HostStep)
            mixed = sparse_attention(absorbed, pages, step, scale, chosen[0])
        by_head = mixed.view(len(absorbed), heads, -1)[..., :rank].transpose(0, 1)
        return torch.matmul(by_head, weight[:, nope:].transpose(1, 2)).transpose(0, 1)[None]


def sparse_attention(
    query: torch.Tensor, pages: torch.Tensor, step: HostStep, scale: float, chosen: torch.Tensor
) -> torch.Tensor:
    """query [T, H, W], pages [2, blocks, 1, page, W], chosen [T, k] -> [T, H, W].

    Token by token: memory is that of k keys, however long the context is.
    """
    tables = step.rows.tables[step.token_rows]
    page_size = pages.shape[3]
    mixed = torch.empty_like(query)
    for token, (table, positions) in enumerate(zip(tables, chosen.long(), strict=True)):
        kept = positions[positions >= 0]
        blocks, offsets = table[kept // page_size], kept % page_size
        keys, values = pages[:, blocks, 0, offsets]
        weights = torch.softmax((query[token] @ keys.T).float() * scale, dim=-1)
        mixed[token] = weights.to(values.dtype) @ values
    return mixed
