"""Define what each layer of a module tree keeps, found by running the tree on the meta device.

Nothing is read from config.json: windows are those of the masks that transformers' own code
requests, widths those of the keys and values it makes. What our attention does not support is
refused here, by name, before any weight is read.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tokenmesh.engine.models.keeps import Cross, Kept, Latent, LayerKeeps, Pages, State
from tokenmesh.engine.models.tree.attention import PORT, Port
from tokenmesh.engine.models.tree.media.cross import CrossPort
from tokenmesh.engine.models.tree.mixers import MixerPort
from tokenmesh.engine.models.tree.mla import AnyMask, IndexerPort, LatentPort, is_latent
from tokenmesh.engine.models.tree.run import RECURRENT, ModulePlace, Run, UnservedModel

PROBE: Final = "tokenmesh_probe"
_FARTHEST: Final = 1 << 24
"""A position that no sequence reaches."""
_KNOWN: Final = frozenset({"softcap", "s_aux", "sliding_window", "is_causal", "position_ids"})
"""It holds what a call of attention may pass that matters or is covered by the mask."""
_HARMLESS: Final = frozenset({"dropout", "use_cache", "output_attentions", "return_dict"})


@dataclass(frozen=True, slots=True, eq=False)
class MaskSeen:
    """A mask that the code requested: causal, with or without a window."""

    window: int | None = None
    refusal: str | None = None
    """Why it is not supported; some trees request masks that no layer uses."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UnservedModel("its code computes with attention masks itself")

    __getitem__ = __add__ = __radd__ = __mul__ = __and__ = __invert__ = __getattr__


@dataclass(slots=True)
class Seen:
    """It holds what one probe has found."""

    run: Run
    keeps: dict[int, list[Kept]] = field(default_factory=dict)
    """By layer_idx."""
    places: list[ModulePlace] = field(default_factory=list)

    def place_of(self, module: torch.nn.Module, kept: Kept) -> ModulePlace:
        """Where a module has what it keeps; the layer is its layer_idx until `number`."""
        layer = _layer_of(module)
        items = self.keeps.setdefault(layer, [])
        items.append(kept)
        self.places.append(ModulePlace(self.run, layer, len(items) - 1))
        return self.places[-1]

    def number(self) -> tuple[LayerKeeps, ...]:
        """Return what the layers keep, in the order of the store, whose numbers the places get."""
        order = sorted(self.keeps)
        for place in self.places:
            place.layer = order.index(place.layer)
        return tuple(tuple(self.keeps[layer]) for layer in order)


class _AtWork(threading.local):
    """The probe at work in a thread: transformers calls functions, not objects."""

    seen: Seen | None = None


_at_work: Final = _AtWork()


def probe(
    run: Run,
    mixers: list[MixerPort],
    indexers: list[IndexerPort],
    crosses: list[CrossPort],
    forward: Callable[[], object],
) -> tuple[LayerKeeps, ...]:
    """Run `forward`, whose attention is PROBE, and give every module its port or place; what the
    layers keep."""
    seen = _at_work.seen = Seen(run)
    run.cached_layers.clear()
    try:
        forward()
    finally:
        _at_work.seen = None
    if own := run.cached_layers - seen.keeps.keys():
        raise UnservedModel(f"layer {min(own)} attends with its own code")
    for mixer in mixers:
        for key, state in mixer.probed.items():
            # recurrences lose too much in half precision
            dtype = torch.float32 if key[0] == RECURRENT else state.dtype
            kept = State(tuple(state.shape[1:]), dtype)
            mixer.places[key] = seen.place_of(mixer.module, kept)
        mixer.probed = {}
    for port in indexers:
        setattr(port.module, PORT, seen.place_of(port.module, Latent(port.width, 0)))
    for cross in crosses:
        cross.place = seen.place_of(cross.module, Cross(cross.heads, cross.head_dim, cross.length))
    if not seen.keeps:
        raise UnservedModel("no layer keeps anything between steps")
    return seen.number()


def _layer_of(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnservedModel(f"{type(module).__name__} does not know its layer")
    return layer


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Note one call; a result of the right shape. Some modules pass the mask by its name."""
    seen = _at_work.seen
    assert seen is not None
    layer, kind = _layer_of(module), type(module).__name__
    mask = attention_mask.mask if isinstance(attention_mask, AnyMask) else attention_mask
    if not isinstance(mask, MaskSeen):
        what = "no mask" if mask is None else "a mask that it made itself"
        raise UnservedModel(f"{kind} attends with {what}")
    if mask.refusal is not None:
        raise UnservedModel(mask.refusal)
    if PORT in vars(module):
        raise UnservedModel(f"{kind} of layer {layer} attends twice in one pass")
    known = _KNOWN | _HARMLESS | ({"indices"} if is_latent(module) else set())
    for name, given in named.items():
        if given is not None and name not in known:
            raise UnservedModel(f"{kind} passes {name} to attention, which is not supported")
    if named.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnservedModel(f"{kind} looks at later tokens")
    softcap, has_sinks = named.get("softcap"), named.get("s_aux") is not None
    width = int(value.shape[-1])
    port: Port | LatentPort
    if is_latent(module):
        if mask.window is not None or softcap or has_sinks:
            raise UnservedModel(f"{kind} has latents with a window, softcap or sinks")
        port = LatentPort(seen.place_of(module, Latent(key.shape[-1], width)), module)
        width = int(module.v_head_dim)  # type: ignore[arg-type]
    else:
        kept = Pages(key.shape[1], key.shape[-1], width, mask.window)
        port = Port(seen.place_of(module, kept), mask.window, softcap, has_sinks, width)
    setattr(module, PORT, port)
    return query.new_empty(1, query.shape[2], query.shape[1], width), None


def _mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **_named: Any
) -> MaskSeen:
    """Read a mask off its function at a few positions: causal, or causal within a window."""
    try:
        return _mask_of(mask_function, local_size)
    except NotImplementedError:  # what a number of a meta tensor raises
        size = "" if local_size is None else f" of size {local_size}"
        what = "depends on more than two positions, as that of chunks does"
        return MaskSeen(refusal=f"its mask{size} {what}")


def _mask_of(mask_function: Callable[..., Any], local_size: int | None) -> MaskSeen:
    def sees(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    far = 4 * (local_size or 1024) + 3
    if sees(0, 1) or sees(far, far + 1):
        return MaskSeen(refusal="its tokens look at later tokens")
    if local_size is None:
        if not all(sees(query, key) for query in (far, _FARTHEST) for key in (0, far // 2, far)):
            return MaskSeen(refusal="its mask is neither causal nor a window")
        return MaskSeen()
    for query in (local_size, local_size + 1, 2 * local_size - 1, far):
        is_window = sees(query, query - local_size + 1) and not sees(query, query - local_size)
        if not is_window:
            return MaskSeen(refusal=f"its mask of size {local_size} is not a sliding window")
    return MaskSeen(local_size)


def _experts(
    _module: torch.nn.Module, hidden: torch.Tensor, *_routes: torch.Tensor
) -> torch.Tensor:
    """A result of the right shape: which experts are hit depends on numbers."""
    return torch.empty_like(hidden)


ALL_ATTENTION_FUNCTIONS.register(PROBE, _attention)
ALL_EXPERTS_FUNCTIONS.register(PROBE, _experts)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, _mask)
