"""Attention of tokens that see their whole prompt: the rows of a step, side by side, no pages.

The rows of a step come sorted by length, so that those of one length lie together and are computed
as a batch, without padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tokenmesh.engine.models.tree.run import UnservedModel
from tokenmesh.kernels import huge_pages
from tokenmesh.kernels.native import fits_rows, native_row_attention

ROWS: Final = "tokenmesh_rows"
"""No mask function has this name, so that transformers makes no masks."""
ROWS_PROBE: Final = "tokenmesh_rows_probe"
PASS_TOKENS: Final = 2048
"""It bounds the tokens of one pass, if they are of several prompts: what a layer makes of more
leaves the caches."""
PORT: Final = "tokenmesh_rows_port"
"""The attribute of a module."""
_HARMLESS: Final = frozenset(
    {"dropout", "use_cache", "output_attentions", "return_dict", "is_causal", "sliding_window"}
)
"""It holds what a call may pass besides the mask; the window is the mask's."""
_BAND: Final = 8
_SHORT: Final = 64
"""Rows up to this length whose lengths are in one band of _BAND are padded to the longest."""
_HARMLESS_ENDS: Final = ("deterministic", "position_ids", "position_embeddings")


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one length: batch tokens [first, first + rows * length)."""

    first: int
    rows: int
    length: int

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.rows * self.length)


@dataclass(frozen=True, slots=True)
class Padded:
    """Short rows of about one length, which cost less as one batch with padding than each alone."""

    first: int
    """This is the first of its batch tokens."""
    gather: torch.Tensor
    """[rows * longest] batch tokens; padding is the row's own last token."""
    valid: torch.Tensor
    """[tokens] place of each token within `gather`."""
    mask: torch.Tensor
    """bool [rows, 1, 1, longest] keys that are not padding."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and tokens of the longest one."""
        return len(self.mask), self.mask.shape[3]

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + len(self.valid))


def batches_of(groups: Sequence[Group], device: torch.device) -> list[Group | Padded]:
    """Join neighboring groups of short rows that are in one band of lengths; device: of their
    tokens."""
    batches: list[Group | Padded] = []
    for band, found in groupby(groups, lambda each: -(-each.length // _BAND)):
        near = list(found)
        if len(near) > 1 and band * _BAND <= _SHORT:
            batches.append(_padded(near, device))
        else:
            batches += near
    return batches


def _padded(groups: Sequence[Group], device: torch.device) -> Padded:
    lengths = torch.tensor([each.length for each in groups for _ in range(each.rows)])
    ends = lengths.cumsum(0)
    places = torch.arange(int(lengths[-1]))
    starts = (groups[0].first + ends - lengths)[:, None]
    gather = starts + torch.minimum(places, lengths[:, None] - 1)
    is_token = places < lengths[:, None]
    return Padded(
        first=groups[0].first,
        gather=gather.flatten().to(device),
        valid=is_token.flatten().nonzero()[:, 0].to(device),
        mask=is_token[:, None, None].to(device),
    )


def groups_of(counts: Sequence[int]) -> list[Group]:
    """counts: tokens of each row, in batch order."""
    groups, first = [], 0
    for length, rows in groupby(counts):
        number = sum(1 for _ in rows)
        groups.append(Group(first, number, length))
        first += number * length
    return groups


@dataclass(slots=True)
class RowsRun:
    """The step at work, for all modules of a tree."""

    batches: Sequence[Group | Padded] = ()
    """As torch computes them."""
    firsts: torch.Tensor | None = None
    """For the C kernels: int64 [rows + 1], the first token of each row, and the end of the last."""
    fits: bool = True
    """It tells whether the C kernels take what was attended to so far."""
    _rooms: dict[str, torch.Tensor] = field(default_factory=dict)

    def room(self, name: str, like: torch.Tensor, width: int) -> torch.Tensor:
        """A tensor [T, width] for results between two kernels; like: [1, T, *], of its dtype.

        The memory is used again for the next of its name: pages of new memory cost as much as a
        pass over it. That of a prompt of more than PASS_TOKENS tokens is given up.
        """
        tokens = like.shape[1]
        if tokens > PASS_TOKENS:
            return like.new_empty(tokens, width)
        kept = self._rooms.get(name)
        if kept is None or kept.shape[1] != width or kept.dtype != like.dtype:
            kept = self._rooms[name] = huge_pages.empty((PASS_TOKENS, width), like.dtype)
        return kept[:tokens]


@dataclass(frozen=True, slots=True)
class RowsPort:
    """It holds what an attention module needs to attend within rows."""

    run: RowsRun
    window: int | None
    """It says how far a token sees to either side; None: the whole row."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query [1, H, T, D], key [1, K, T, D], value [1, K, T, V] -> [1, T, H, V]."""
        if self.run.firsts is not None:
            return native_row_attention(query, key, value, self.run.firsts, self.window, scale)
        self.run.fits &= fits_rows(query, key, value)
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        grouped = query.shape[1] != key.shape[1]
        for batch in self.run.batches:
            parts = [_split(each, batch) for each in (query, key, value)]
            mask = _mask_of(self.window, batch, query.device)
            mixed = scaled_dot_product_attention(
                parts[0], parts[1], parts[2], attn_mask=mask, scale=scale, enable_gqa=grouped
            ).transpose(1, 2)
            if isinstance(batch, Padded):
                out[0, batch.tokens] = mixed.flatten(0, 1).index_select(0, batch.valid)
            else:
                out[0, batch.tokens].view(mixed.shape).copy_(mixed)
        return out


def _split(heads: torch.Tensor, batch: Group | Padded) -> torch.Tensor:
    """[1, H, T, D] -> [rows, H, length, D] of a batch."""
    tokens = heads[0].transpose(0, 1)
    if isinstance(batch, Padded):
        tokens, shape = tokens.index_select(0, batch.gather), batch.shape
    else:
        tokens, shape = tokens[batch.tokens], (batch.rows, batch.length)
    return tokens.view(*shape, *tokens.shape[1:]).transpose(1, 2)


def _mask_of(
    window: int | None, batch: Group | Padded, device: torch.device
) -> torch.Tensor | None:
    """Return which keys each query sees; None: all."""
    padding, length = None, batch.length if isinstance(batch, Group) else batch.shape[1]
    if isinstance(batch, Padded):
        padding = batch.mask
    if window is None or length <= window + 1:
        return padding
    places = torch.arange(length, device=device)
    within: torch.Tensor = (places[:, None] - places[None]).abs() <= window
    return within if padding is None else within & padding


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: object = None,
    scaling: float | None = None,
    **_named: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, by the port of the module; what else a call may pass was
    checked by the probe."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return getattr(module, PORT).attend(query, key, value, scale), None


@dataclass(frozen=True, slots=True)
class SeenMask:
    """A mask that the code requested."""

    window: int | None
    refusal: str | None = None


_ports: list[torch.nn.Module] = []
_run: RowsRun | None = None
"""This is the run of the probe at work: transformers calls functions, not objects. One model loads
at a time."""


def probe(run: RowsRun, forward: Callable[[], object]) -> int:
    """Run `forward`, whose attention is ROWS_PROBE, and give its attention modules their ports;
    how many. Raises UnservedModel."""
    global _run
    _run = run
    _ports.clear()
    try:
        forward()
        return len(_ports)
    finally:
        _run = None
        _ports.clear()


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    _key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    assert _run is not None
    kind = type(module).__name__
    mask = SeenMask(None) if attention_mask is None else attention_mask
    if not isinstance(mask, SeenMask):
        raise UnservedModel(f"{kind} attends with a mask that it made itself")
    if mask.refusal is not None:
        raise UnservedModel(mask.refusal)
    for name, given in named.items():
        if given is not None and name not in _HARMLESS and not name.startswith(_HARMLESS_ENDS):
            raise UnservedModel(f"{kind} passes {name} to attention, which is not supported")
    setattr(module, PORT, RowsPort(_run, mask.window))
    _ports.append(module)
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _probe_mask(
    *, mask_function: Callable[..., Any], config: Any = None, **_named: Any
) -> SeenMask:
    """Read a mask off its function: how far a token sees to either side."""
    far = 4 * (getattr(config, "sliding_window", None) or 1024) + 3
    zero, query = torch.tensor(0), torch.tensor(far)
    keys = torch.arange(2 * far + 1)
    seen = torch.as_tensor(mask_function(zero, zero, query, keys)).expand(len(keys))
    if bool(seen.all()):
        return SeenMask(None)
    before, after = int(seen[:far].sum()), int(seen[far + 1 :].sum())
    expected = (keys - far).abs() <= before
    if before != after or not torch.equal(seen, expected):
        return SeenMask(None, "its mask is neither a whole prompt nor a window on both sides")
    return SeenMask(before)


ALL_ATTENTION_FUNCTIONS.register(ROWS, attention)
ALL_ATTENTION_FUNCTIONS.register(ROWS_PROBE, _probe_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ROWS_PROBE, _probe_mask)
