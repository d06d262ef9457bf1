"""Experts that stay in the checkpoint while a tree is loaded, where plain ones would fill memory.

Their parameters are on the meta device. Those of a layer are read when its code runs, and dropped
after it; `settle` reads them to stay. Each reading decodes the weights again.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tokenmesh.engine.device_memory import CudaMemory
from tokenmesh.engine.host_memory import available_host_bytes
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.tree.probe import PROBE
from tokenmesh.engine.models.tree.quantized.expert_codes import (
    StoredExperts,
    is_experts,
    offer,
    places_of,
    round_numbers,
)
from tokenmesh.kernels.linear.formats.round import Rounding
from tokenmesh.kernels.moe import ExpertsSpec

_DEFERRED: Final = "tokenmesh_deferred"
"""Attribute of an experts module."""
_SHARE: Final = 0.5
"""Plain experts may take this share of the memory that is available: plain experts beyond it are
deferred."""

logger = logging.getLogger(__name__)


class DeferredExperts:
    """The experts of one layer."""

    def __init__(self, kind: type[Any], stored: StoredExperts) -> None:
        """kind: the module's class."""
        self.kind = kind
        self._stored = stored
        self.rounding: tuple[Rounding, ExpertsSpec] | None = None
        """It holds what plain weights are rounded to whenever they are read."""

    def __deepcopy__(self, _memo: object) -> "DeferredExperts":
        return self

    @property
    def stored(self) -> list[str]:
        """Names of the checkpoint's tensors."""
        return [place.name for places in self._stored.places.values() for place in places]

    def attach(self, module: torch.nn.Module) -> None:
        """Let a module without weights read them when it runs, and have their codes."""
        setattr(module, _DEFERRED, self)
        self.drop(module)
        offer(module, self._stored)
        module.register_forward_pre_hook(_fill)
        module.register_forward_hook(_drop)

    @property
    def parameters(self) -> list[str]:
        return list(self._stored.places)

    def fill(self, module: Any) -> None:
        """Read the weights in the types of the parameters."""
        for name, places in self._stored.places.items():
            own = module.get_parameter(name)
            device = self._stored.checkpoint.device
            stack = torch.empty(own.shape, dtype=own.dtype, device=device)
            for place in places:
                self._read(place.name, place.of(stack))
            module._parameters[name] = torch.nn.Parameter(stack, requires_grad=False)
        if self.rounding is not None:
            rounding, spec = self.rounding
            round_numbers(module, spec, rounding)

    def drop(self, module: Any) -> None:
        """Leave parameters their shapes and types, without memory."""
        for name in self._stored.places:
            own = module.get_parameter(name)
            empty = torch.empty(own.shape, dtype=own.dtype, device="meta")
            module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)

    def _read(self, name: str, target: torch.Tensor) -> None:
        if target.is_contiguous():
            self._stored.checkpoint.take_into(name, target)
            return
        straight = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        self._stored.checkpoint.take_into(name, straight)
        target.copy_(straight)


def find_deferred(
    tree: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype
) -> dict[str, DeferredExperts]:
    """The experts of an empty tree that are to be deferred, by their paths; none if all of them fit
    into memory. Those whose places in the checkpoint are not found are loaded as all other weights.
    """
    shapes = checkpoint.shapes()
    found = {}
    num_bytes = 0
    for path, module in tree.named_modules():
        if is_experts(module):
            own = _deferred(tree, checkpoint, shapes, path, module)
            if own is not None:
                found[path] = own
                sizes = (module.get_parameter(name).numel() for name in own.parameters)
                num_bytes += sum(sizes) * dtype.itemsize
    if num_bytes <= _SHARE * _available_bytes(checkpoint.device):
        return {}
    what = "experts take %d MiB as plain weights: they are read layer by layer, several times"
    logger.info(what, num_bytes >> 20)
    return found


def _available_bytes(device: torch.device) -> int:
    """Return the available bytes of the memories that a tree for this device passes through."""
    host = available_host_bytes()
    return host if device.type == "cpu" else min(host, CudaMemory(device).free())


def _deferred(
    tree: PreTrainedModel,
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    path: str,
    module: torch.nn.Module,
) -> DeferredExperts | None:
    places = places_of(tree, path)
    if places is None:
        return None
    for name in places:
        whole = torch.empty(module.get_parameter(name).shape, device="meta")
        asked = revert_weight_conversion(tree, {f"{path}.{name}": whole})
        if any(shapes.get(each) != tuple(asked[each].shape) for each in asked):
            return None
    return DeferredExperts(type(module), StoredExperts(checkpoint, places))


def defer(tree: torch.nn.Module, found: Mapping[str, DeferredExperts]) -> None:
    """Let the experts of a loaded tree read their weights when they run."""
    for path, deferred in found.items():
        deferred.attach(tree.get_submodule(path))


def deferred_of(module: torch.nn.Module) -> DeferredExperts | None:
    """None where a module has its weights."""
    return vars(module).get(_DEFERRED)


def settle(module: torch.nn.Module) -> None:
    """Read the weights of all experts in a module for as long as it has them."""
    for each in module.modules():
        deferred: DeferredExperts | None = vars(each).pop(_DEFERRED, None)
        if deferred is not None:
            deferred.fill(each)


def _is_running(module: Any) -> bool:
    """Return whether the call computes with the weights; a probe does not."""
    return getattr(module.config, "_experts_implementation", None) != PROBE


def _fill(module: torch.nn.Module, _given: object) -> None:
    deferred = deferred_of(module)
    if deferred is not None and _is_running(module):
        deferred.fill(module)


def _drop(module: torch.nn.Module, _given: object, _made: object) -> None:
    deferred = deferred_of(module)
    if deferred is not None and _is_running(module):
        deferred.drop(module)


@contextmanager
def left_uninitialized(kinds: Collection[type[Any]]) -> Iterator[None]:
    """Within it transformers gives modules of these classes no random weights, which would fill
    their memory, and does not warn of weights that were not loaded."""
    theirs = logging.getLogger("transformers.modeling_utils")
    level = theirs.level
    if kinds:
        theirs.setLevel(logging.ERROR)
    for kind in kinds:
        kind._is_hf_initialized = True
    try:
        yield
    finally:
        theirs.setLevel(level)
        for kind in kinds:
            del kind._is_hf_initialized
