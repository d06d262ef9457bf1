"""A checkpoint's config.json -> the kind of model that serves it; its weights -> that model.

A worker with a native model never imports transformers' modules, which takes seconds.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from tokenmesh.services.worker_svc.media_facts import TEXT_ONLY
from tokenmesh.services.worker_svc.models.api import LanguageModel, ModelFacts, Progress
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint
from tokenmesh.services.worker_svc.models.native.build_decoder import build_decoder
from tokenmesh.services.worker_svc.models.native.read_config import (
    NativeFacts,
    is_native,
    read_facts,
)
from tokenmesh.services.worker_svc.models.raw_config import RawConfig
from tokenmesh.shared.config.model import ModelSettings

logger = logging.getLogger(__name__)


def read_model_facts(raw: RawConfig, directory: Path, model: ModelSettings) -> ModelFacts:
    """Raises CheckpointError that says why a checkpoint cannot be served."""
    facts = _read(raw, directory, model)
    return replace(facts, media=TEXT_ONLY) if model.language_model_only else facts


def _read(raw: RawConfig, directory: Path, model: ModelSettings) -> ModelFacts:
    impl = model.model_impl
    if impl == "native" or (impl == "auto" and is_native(raw)):
        return read_facts(raw)
    from tokenmesh.services.worker_svc.models.hf.facts import read_hf_facts

    return read_hf_facts(raw, directory, model.trust_remote_code)


def load_model(
    facts: ModelFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    has_kernels: bool,
) -> LanguageModel:
    """Load every tensor. has_kernels: the C kernels have been started.

    Raises CheckpointError for any that is missing, misshapen or unknown.
    """
    if facts.quantization is not None:
        checkpoint.decode(facts.quantization)
    if isinstance(facts, NativeFacts):
        return build_decoder(facts, checkpoint, dtype, progress, has_kernels)
    from tokenmesh.services.worker_svc.models.hf.build import build_hf
    from tokenmesh.services.worker_svc.models.hf.facts import HfFacts

    assert isinstance(facts, HfFacts)
    return build_hf(facts, checkpoint, dtype, progress, has_kernels)
