"""Weights of the general kind: read by transformers' own conversion tables, strictly.

Tensors of a checkpoint are given to transformers' loader unread, and read when it takes them.
"""

import copy
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tokenmesh.engine.models.api import Progress
from tokenmesh.engine.models.checkpoint import Checkpoint, listed, misshapen
from tokenmesh.engine.models.extra_layers import counted, layer_of
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.engine.models.tree.facts import HfFacts, empty_tree
from tokenmesh.engine.models.tree.media.language import is_of_tower
from tokenmesh.engine.models.tree.part import TreePart
from tokenmesh.engine.models.tree.quantized.deferred_experts import (
    DeferredExperts,
    defer,
    left_uninitialized,
)
from tokenmesh.shared.errors import CheckpointError

Stored = Any
"""A tensor that is not read yet, as `safe_open` has it: `[...]` reads it, `get_shape` does not."""
_BUFFER_TYPES: Final = ("I64", "BOOL")
"""Tensors of these types follow from config.json, and some checkpoints hold them."""
_loading: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A weight that is made of several tensors when it is read."""

    name: str
    shape: tuple[int, ...]
    checkpoint: Checkpoint
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, tuple) and len(index) == len(self.shape) == 2:
            rows, columns = index
            part = torch.empty(
                (rows.stop - rows.start, columns.stop - columns.start), dtype=self.dtype
            )
            self.checkpoint.take_part(self.name, self.shape, rows, columns, part)
            return part
        weight = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.checkpoint.take_into(self.name, weight)
        return weight[index]

    def get_shape(self) -> Sequence[int]:
        return self.shape


def _stored_tensors(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Stored]:
    """All tensors by name, quantized ones as `dtype`. Raises CheckpointError for other types."""
    checkpoint.check_types(_BUFFER_TYPES)
    opened: dict[Path, Any] = {}

    def stored(name: str, shape: tuple[int, ...]) -> Stored:
        if checkpoint.is_encoded(name):
            return _Decoded(name, shape, checkpoint, dtype)
        file = checkpoint.file_of(name)
        if file not in opened:
            opened[file] = safe_open(file, framework="pt")
        return opened[file].get_slice(checkpoint.stored_name(name))

    return {name: stored(name, shape) for name, shape in checkpoint.shapes().items()}


def read_weights(
    facts: HfFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    is_ignored: Callable[[str, str], bool] = lambda _name, _problem: False,
    deferred: Mapping[str, DeferredExperts] = MappingProxyType({}),
    part: TreePart | None = None,
) -> PreTrainedModel:
    """The tree with all weights in `dtype`, in eval mode, but those of the experts in `deferred`.

    part: what is read of them; facts are its own then.

    is_ignored: whether a tensor may be "missing" or "unexpected".
    Raises CheckpointError for a tensor that is missing, misshapen, left over or of another type.
    """
    tensors = _stored_tensors(checkpoint, dtype)
    if part is not None:
        tensors = part.taken(tensors, checkpoint.shapes())
    if facts.left_out:
        tensors = {n: each for n, each in tensors.items() if not n.startswith(facts.left_out)}
    if numbered := _dropped_by_number(facts, tensors):
        place = _place_of(checkpoint, numbered)
        raise CheckpointError(f"{place}: unexpected tensors: {listed(numbered)}: {_stated(facts)}")
    total = checkpoint.num_bytes(())
    progress(0, total)
    try:
        model, found = _loaded(facts, tensors, dtype, deferred)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # whatever its conversions raise about tensors
        what = _difference(facts, checkpoint, tensors) or f"{facts.directory}: {error}"
        raise CheckpointError(what) from error
    for name, stored, asked in sorted(found["mismatched_keys"]):
        raise CheckpointError(f"{checkpoint.file_of(name)}: {misshapen(name, stored, asked)}")
    for what in ("missing", "unexpected"):
        _check_names(facts, checkpoint, what, found[f"{what}_keys"], is_ignored)
    progress(total, total)
    tree: PreTrainedModel = model.eval()
    defer(tree, deferred)
    if checkpoint.device.type != "cpu":
        # in place, one tensor after the other; those without memory stay so
        tree._apply(lambda each: each if each.is_meta else each.to(checkpoint.device))
    return tree


def _check_names(
    facts: HfFacts,
    checkpoint: Checkpoint,
    what: str,
    names: Iterable[str],
    is_ignored: Callable[[str, str], bool],
) -> None:
    """Raise CheckpointError for tensors that are `what`, unless that may be."""
    names = [n for n in names if not checkpoint.is_neutral(n) and not is_ignored(n, what)]
    if names := [name for name in names if not is_of_tower(facts.kind, name)]:
        place = _place_of(checkpoint, names)
        raise CheckpointError(f"{place}: {what} tensors: {listed(names)}")


def _stated(facts: HfFacts) -> str:
    depth = facts.config.get_text_config().num_hidden_layers
    key, count = counted(read_json(facts.directory / "config.json"))
    return f"config.json states {depth} layers, and by {key} {count} more"


def _dropped_by_number(facts: HfFacts, names: Iterable[str]) -> list[str]:
    """Tensors that transformers would leave out by the number of their layer, such as 61.

    Those numbers are of one published model; here config.json says which layers are not read, and
    what is left of such a layer is one of the model's own that is missing in the config.
    """
    patterns = facts.kind._keys_to_ignore_on_load_unexpected or ()
    numbered = [re.compile(each) for each in patterns if re.search(r"layers\\\.\d", each)]
    depth = facts.config.get_text_config().num_hidden_layers
    return [
        name
        for name in names
        if any(each.search(name) for each in numbered)
        and (layer_of(name) or 0) >= depth
        and not is_of_tower(facts.kind, name)
    ]


def _loaded(
    facts: HfFacts,
    tensors: Mapping[str, Stored],
    dtype: torch.dtype,
    deferred: Mapping[str, DeferredExperts],
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The tree, and what transformers says of tensors that do not fit it."""
    apart = {name for each in deferred.values() for name in each.stored}
    config = copy.deepcopy(facts.config)
    for part in (config, config.get_text_config()):
        # transformers would divide weights that are loaded, as if they were new
        if getattr(part, "rescale_prenorm_residual", False):
            part.rescale_prenorm_residual = False
    # transformers changes what all threads see while it loads
    with _loading, left_uninitialized({each.kind for each in deferred.values()}):
        model, found = facts.kind.from_pretrained(
            None,
            state_dict={n: each for n, each in tensors.items() if n not in apart},
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    own = {f"{path}.{name}" for path, each in deferred.items() for name in each.parameters}
    return model, {**found, "missing_keys": set(found["missing_keys"]) - own}


def _place_of(checkpoint: Checkpoint, names: Iterable[str]) -> Path:
    """The file that holds those of them that are stored; the directory if there is not one."""
    files = {checkpoint.file_of(name) for name in names if name in checkpoint}
    return files.pop() if len(files) == 1 else checkpoint.directory


def _difference(facts: HfFacts, checkpoint: Checkpoint, stored: Mapping[str, Stored]) -> str:
    """Return how the tensors differ from those of config.json; "" if they do not."""
    tree = empty_tree(facts.config, facts.kind)
    tensors = revert_weight_conversion(tree, tree.state_dict())
    asked = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(asked.keys() & stored.keys()):
        if (shape := list(stored[name].get_shape())) != asked[name]:
            return f"{checkpoint.file_of(name)}: {misshapen(name, shape, asked[name])}"
    if missing := asked.keys() - stored.keys():
        return f"{facts.directory}: missing tensors: {listed(missing)}"
    unexpected = {name for name in stored if not is_of_tower(facts.kind, name)} - asked.keys()
    if unexpected:
        place = _place_of(checkpoint, unexpected)
        return f"{place}: unexpected tensors: {listed(unexpected)}"
    return ""
