"""Weights of the general kind: read by transformers' own conversion tables, strictly."""

import copy

import torch
from transformers import PreTrainedModel

from tokenmesh.services.worker_svc.models.api import Progress
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.shared.errors import CheckpointError

_SHOWN = 5
"""Names listed in an error."""


def read_weights(facts: HfFacts, dtype: torch.dtype, progress: Progress) -> PreTrainedModel:
    """The tree with all weights in `dtype`, in eval mode.

    Raises CheckpointError for a tensor that is missing, misshapen or left over.
    """
    total = sum(file.stat().st_size for file in facts.directory.glob("*.safetensors"))
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
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{facts.directory}: {error}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(str(name) for name in found[problem]):
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            what = problem.removesuffix("_keys")
            listed = ", ".join(names[:_SHOWN])
            raise CheckpointError(f"{facts.directory}: {what} tensors: {listed}{more}")
    progress(total, total)
    tree: PreTrainedModel = model.eval()
    return tree
