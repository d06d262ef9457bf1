"""A checkpoint's config.json -> the kind of model that serves it; its weights -> that model."""

import torch

from tokenmesh.services.worker_svc.models.api import Model, ModelFacts, Progress
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint
from tokenmesh.services.worker_svc.models.native.build_decoder import build_decoder
from tokenmesh.services.worker_svc.models.native.read_config import NativeFacts


def load_model(
    facts: ModelFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    has_kernels: bool,
) -> Model:
    """Load every tensor. has_kernels: the C kernels have been started.

    Raises CheckpointError for any that is missing, misshapen or unknown.
    """
    assert isinstance(facts, NativeFacts)
    return build_decoder(facts, checkpoint, dtype, progress, has_kernels)
