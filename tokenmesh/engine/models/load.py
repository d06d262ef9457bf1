"""A checkpoint's config.json -> the kind of model that serves it; its weights -> that model.

A worker with a native model never imports transformers' modules, which takes seconds.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from tokenmesh.engine.media_facts import TEXT_ONLY
from tokenmesh.engine.models.api import LanguageModel, ModelFacts, Progress
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.native.build_decoder import build_decoder
from tokenmesh.engine.models.native.read_config import (
    NativeFacts,
    is_native,
    read_facts,
)
from tokenmesh.engine.models.quantization import Quantization
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.engine.ranks.ranks import ALONE, Ranks
from tokenmesh.kernels.linear.formats.round import Rounding
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)


def read_model_facts(raw: RawConfig, directory: Path, model: ModelSettings) -> ModelFacts:
    """Raises CheckpointError that says why a checkpoint cannot be served."""
    facts = _read(raw, directory, model)
    return replace(facts, media=TEXT_ONLY) if model.language_model_only else facts


def _read(raw: RawConfig, directory: Path, model: ModelSettings) -> ModelFacts:
    impl = model.model_impl
    facts: ModelFacts
    if impl == "native" or (impl == "auto" and is_native(raw)):
        facts = read_facts(raw)
    else:
        from tokenmesh.engine.models.tree.facts import read_hf_facts

        facts = read_hf_facts(raw, directory, model.trust_remote_code)
    return replace(facts, rounding=_rounding(facts.quantization, model))


def _rounding(stored: Quantization | None, model: ModelSettings) -> Rounding | None:
    """Return what plain weights are rounded to. Raises ConfigError where a checkpoint is stored
    unlike it.

    A checkpoint that is quantized keeps its format, and the setting may only confirm it.
    """
    asked = model.quantization
    if asked is None:
        return None
    if stored is not None:
        if asked.removesuffix("_marlin") != stored.method:
            problem = f"is {asked!r}, but {model.model} is quantized as {stored.method!r}"
            raise ConfigError(f"quantization {problem}; leave it out", param="quantization")
        return None
    if asked not in get_args(Rounding):
        known = ", ".join(get_args(Rounding))
        problem = f"is {asked!r}, but {model.model} is not quantized"
        raise ConfigError(f"quantization {problem}; {known} quantize it", param="quantization")
    rounding: Rounding = asked  # type: ignore[assignment]
    return rounding


def load_model(
    facts: ModelFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    has_kernels: bool,
    ranks: Ranks = ALONE,
) -> LanguageModel:
    """Load every tensor, or the parts of this rank. has_kernels: the C kernels have been started.

    Raises CheckpointError for any that is missing, misshapen or unknown.
    """
    form = facts.rounding or (facts.quantization and facts.quantization.method)
    if form is not None and not has_kernels and checkpoint.device.type == "cpu":
        what = "weights in %s are decoded to %s, which saves no memory and is slow: no C kernels"
        logger.warning(what, form, dtype)
    if facts.quantization is not None:
        checkpoint.decode(facts.quantization)
    if isinstance(facts, NativeFacts):
        return build_decoder(facts, checkpoint, dtype, progress, has_kernels, ranks)
    from tokenmesh.engine.models.tree.build import build_hf
    from tokenmesh.engine.models.tree.facts import HfFacts

    assert isinstance(facts, HfFacts)
    return build_hf(facts, checkpoint, dtype, progress, has_kernels, ranks)
