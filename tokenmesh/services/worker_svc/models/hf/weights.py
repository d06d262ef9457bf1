"""Weights of the general kind: read by transformers' own conversion tables, strictly."""

import copy
from typing import Final

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tokenmesh.services.worker_svc.models.api import Progress
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint, listed, misshapen
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts, empty_tree
from tokenmesh.shared.errors import CheckpointError

_BUFFER_TYPES: Final = ("I64", "BOOL")
"""Of tensors that follow from config.json, which some checkpoints hold."""


def read_weights(
    facts: HfFacts, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress
) -> PreTrainedModel:
    """The tree with all weights in `dtype`, in eval mode.

    Raises CheckpointError for a tensor that is missing, misshapen, left over or of another type.
    """
    checkpoint.check_types(_BUFFER_TYPES)
    total = checkpoint.num_bytes(())
    progress(0, total)
    try:
        model, found = facts.kind.from_pretrained(
            facts.directory,
            config=copy.deepcopy(facts.config),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # whatever its conversions raise about tensors
        what = _difference(facts, checkpoint) or str(error)
        raise CheckpointError(f"{facts.directory}: {what}") from error
    for name, stored, asked in sorted(found["mismatched_keys"]):
        raise CheckpointError(f"{checkpoint.file_of(name)}: {misshapen(name, stored, asked)}")
    for problem in ("missing_keys", "unexpected_keys"):
        if names := found[problem]:
            what = problem.removesuffix("_keys")
            raise CheckpointError(f"{facts.directory}: {what} tensors: {listed(names)}")
    progress(total, total)
    tree: PreTrainedModel = model.eval()
    return tree


def _difference(facts: HfFacts, checkpoint: Checkpoint) -> str:
    """How the tensors differ from those that config.json asks for; "" if they do not."""
    tree = empty_tree(facts.config, facts.kind)
    tensors = revert_weight_conversion(tree, tree.state_dict())
    asked = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    stored = checkpoint.shapes()
    for name in sorted(asked.keys() & stored.keys()):
        if stored[name] != asked[name]:
            return misshapen(name, stored[name], asked[name])
    if missing := asked.keys() - stored.keys():
        return f"missing tensors: {listed(missing)}"
    unexpected = stored.keys() - asked.keys()
    return f"unexpected tensors: {listed(unexpected)}" if unexpected else ""
