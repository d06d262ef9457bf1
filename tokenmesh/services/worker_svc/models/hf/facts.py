"""config.json -> HfFacts, by transformers' own reading of it and a probe of the empty tree."""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from tokenmesh.services.worker_svc.models.api import ModelFacts
from tokenmesh.services.worker_svc.models.hf.rope import length_ropes
from tokenmesh.services.worker_svc.models.hf.tree import adapt
from tokenmesh.services.worker_svc.models.hf.unserved import UnservedModel
from tokenmesh.services.worker_svc.models.raw_config import RawConfig
from tokenmesh.shared.errors import CheckpointError

UNBOUNDED: Final = 32768
"""Longest sequence of a model that has no such limit itself; max_model_len may ask for less."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HfFacts(ModelFacts):
    """What the general kind needs to know of a checkpoint beside that."""

    directory: Path
    config: PreTrainedConfig
    kind: type[PreTrainedModel]


def read_hf_facts(raw: RawConfig, directory: Path) -> HfFacts:
    """Raises CheckpointError with the reason where the architecture cannot be served."""
    architecture = _architecture(raw)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever a config class raises about its own keys
        raise CheckpointError(f"{raw.origin}: transformers refuses it: {error}") from error
    kind = getattr(transformers, architecture, None)
    try:
        if kind is None or not issubclass(kind, PreTrainedModel):
            raise UnservedModel("transformers has no such class")
        if not kind.can_generate():
            raise UnservedModel("it does not generate text")
        facts = _facts_of(raw, directory, architecture, config, kind)
        adapt(empty_tree(facts), facts.ropes).probe()
    except UnservedModel as error:
        raise CheckpointError(
            f"{raw.origin}: {architecture} cannot be served: {error.message}", param="architectures"
        ) from error
    return facts


def empty_tree(facts: HfFacts) -> PreTrainedModel:
    """The module tree on the meta device."""
    try:
        with torch.device("meta"):
            return facts.kind._from_config(
                copy.deepcopy(facts.config), attn_implementation="eager"
            ).eval()
    except Exception as error:
        raise UnservedModel(f"transformers cannot build it: {error}") from error


def _architecture(raw: RawConfig) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise raw.error("architectures", "is missing: this is no config of a language model")
    if raw.get("auto_map") is not None:
        raise raw.error("auto_map", "names code of the checkpoint's own, which is not run")
    if raw.part("quantization_config") is not None:
        raise raw.error("quantization_config", "is set; only unquantized checkpoints are supported")
    return names[0]


def _facts_of(
    raw: RawConfig,
    directory: Path,
    architecture: str,
    config: PreTrainedConfig,
    kind: type[PreTrainedModel],
) -> HfFacts:
    text: Any = config.get_text_config()
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return HfFacts(
        architecture=architecture,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_position=getattr(text, "max_position_embeddings", None) or UNBOUNDED,
        ropes=length_ropes(raw, text),
        takes_images=False,
        dtype=dtype if isinstance(dtype, str) else None,
        directory=directory,
        config=config,
        kind=kind,
    )
