"""The attention function that transformers' modules call: pages are written, then read.

Registered as ATTENTION. Each attention module gets a port when the probe has seen what it keeps.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.tree.run import ModulePlace
from tokenmesh.kernels.kv_write import kv_write
from tokenmesh.kernels.native import ProgramInputs, fits_pages, has_started
from tokenmesh.kernels.page_codes import head_width
from tokenmesh.kernels.paged_attention import paged_attention, variant_of

ATTENTION: Final = "tokenmesh"
"""No mask function has this name, which makes transformers build no masks at all."""
PORT: Final = "tokenmesh_port"
"""The attribute of a module."""


@dataclass(slots=True)
class Port:
    """One attention module's pages, and what its probe saw of how it attends."""

    place: ModulePlace
    window: int | None
    softcap: float | None
    has_sinks: bool
    value_dim: int

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [1, H, T, D], key [1, K, T, D], value [1, K, T, V] -> [1, T, H, V].

        The keys and values of all rows are written before any row reads: a row may hit a block
        that another row of the same step fills.
        """
        step, pages = self.place.run.step, self.place.tensor
        assert step is not None
        if isinstance(step, HostStep) and self._runs_in_c(query, key, pages, step):
            tables, place = [step.tables(self.place.group)], self.place
            table = place.store.scale_table
            inputs = ProgramInputs(
                step.starts,
                step.counts,
                step.numbers,
                tables,
                (),
                None,
                page_scales=None if table is None else table[place.layer],
            )
            return place.run.attention.attend(
                query,
                key,
                value,
                pages,
                inputs,
                scale,
                self.window,
                self.softcap,
            )
        keys_values = torch.cat([padded(key[0], pages), padded(value[0], pages)]).transpose(0, 1)
        group = self.place.group
        kv_write(keys_values.contiguous(), pages, step.slots(pages, group), *self.place.scale)
        rows = step.attention(self.window, pages, group)
        variant = variant_of(self.softcap, sinks, *self.place.scale)
        mixed = paged_attention(
            padded(query[0], pages).transpose(0, 1), pages, rows, scale, variant
        )
        heads = query.shape[1]
        return mixed.view(1, query.shape[2], heads, -1)[..., : self.value_dim]

    def _runs_in_c(
        self, query: torch.Tensor, key: torch.Tensor, pages: torch.Tensor, step: HostStep
    ) -> bool:
        """Return whether the C kernels have been started and do all that this layer does."""
        is_plain = not self.has_sinks and not step.media.spans
        return has_started() and is_plain and fits_pages(query, key, pages, self.value_dim)


def padded(heads: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[*, D] with zeros up to the width of a slot of the pages."""
    missing = head_width(pages) - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: object = None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **_named: Any,
) -> tuple[torch.Tensor, None]:
    """See `Port.attend`. What else a call may pass was checked by the probe."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    chosen = () if indices is None else (indices,)
    return getattr(module, PORT).attend(query, key, value, scale, s_aux, *chosen), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
