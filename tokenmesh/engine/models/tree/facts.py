"""config.json -> HfFacts, by transformers' own reading of it and a probe of the empty tree."""

import copy
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tokenmesh.engine.api.media import AUDIO
from tokenmesh.engine.media_facts import MediaFacts
from tokenmesh.engine.models.api import ModelFacts, heads_problem
from tokenmesh.engine.models.extra_layers import extra_layers, is_extra
from tokenmesh.engine.models.keeps import Cross, Kept, Latent, LayerKeeps, Pages
from tokenmesh.engine.models.native.read_rope import stretched
from tokenmesh.engine.models.quantization import Quantization, read_quantization
from tokenmesh.engine.models.quantization.read import KEYS
from tokenmesh.engine.models.raw_config import RawConfig, architecture_of
from tokenmesh.engine.models.tree.media.cross import DECODERS, ENCODERS
from tokenmesh.engine.models.tree.media.language import (
    is_of_tower,
    media_facts,
    without_towers,
)
from tokenmesh.engine.models.tree.mixers import has_flat_form
from tokenmesh.engine.models.tree.run import UnservedModel
from tokenmesh.engine.models.tree.tree import adapt, length_ropes
from tokenmesh.kernels.alignment import MULTIPLE
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.lean_import import without_compiler

UNBOUNDED: Final = 32768
"""Longest sequence of a model that has no such limit itself; max_model_len may be less."""

_LEFT_OUT: Final[dict[str, tuple[str, ...]]] = {
    **{architecture: (prefix,) for architecture, prefix in ENCODERS.items()},
    # what speaks
    "Qwen3OmniMoeThinkerForConditionalGeneration": ("talker.", "code2wav."),
}
"""See `HfFacts.left_out`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HfFacts(ModelFacts):
    """ModelFacts with what the general kind also needs."""

    directory: Path
    config: PreTrainedConfig
    kind: type[PreTrainedModel]
    keeps: tuple[LayerKeeps, ...] = ()
    mixers: tuple[type[torch.nn.Module], ...] = ()
    """Kinds of modules that keep a state."""
    left_out: tuple[str, ...] = ()
    """It holds what the names of tensors begin with that another service loads, or none."""

    def is_extra(self, name: str) -> bool:
        """Layers of towers have numbers of their own."""
        return is_extra(name, self.extra_layers) and not is_of_tower(self.kind, name)

    def gpu_problem(self) -> str | None:
        if self.media.hears_all:
            return "recordings that are added to all tokens of a row run on a CPU only"
        problems = [_gpu_problem_of(each) for layer in self.keeps for each in layer]
        problems += [
            f"its {kind.__name__} keeps a state that no kernel of a GPU computes"
            for kind in self.mixers
            if not has_flat_form(kind)
        ]
        return next((each for each in problems if each is not None), None)


def _gpu_problem_of(kept: Kept) -> str | None:
    match kept:
        case Cross():
            return "cross attention has no kernel for a GPU yet"
        case Pages():
            return heads_problem(kept.width)
        # the keys of an indexer have no turned part, and no kernel reads them
        case Latent() if kept.rope_dim:
            widths = (kept.rank, kept.rope_dim)
            if any(width < MULTIPLE or width & (width - 1) for width in widths):
                return (
                    f"latents of {kept.rank} and {kept.rope_dim} features do not run on a GPU: "
                    f"both must be powers of two, at least {MULTIPLE}"
                )
    return None


@without_compiler()
def read_hf_facts(raw: RawConfig, directory: Path, trust_remote_code: bool) -> HfFacts:
    """Raises CheckpointError with the reason where the architecture cannot be served.

    trust_remote_code: code that config.json names in `auto_map` is imported.
    """
    architecture = architecture_of(raw)
    quantization = read_quantization(raw)
    is_known = raw.get("model_type") in CONFIG_MAPPING and hasattr(transformers, architecture)
    if raw.get("auto_map") is not None and not trust_remote_code and not is_known:
        problem = "names code of the checkpoint's own, which only --trust-remote-code runs"
        raise raw.error("auto_map", problem)
    try:
        whole = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
        config = getattr(whole, "thinker_config", whole)
        if config is not whole:
            logger.warning("the talker of %s is not served: answers are texts", directory)
        forget_quantization(config)
        kind = _class_of(raw, architecture, directory, trust_remote_code)
    except Exception as error:  # whatever a config class raises about its own keys
        raise CheckpointError(
            f"{raw.origin}: transformers refuses it: {type(error).__name__}: {error}"
        ) from error
    try:
        if kind is None:
            raise UnservedModel("transformers has no such class")
        if not kind.can_generate():
            raise UnservedModel("it does not generate text")
        check_config_class(raw, config, kind)
        tree = build_empty(raw, config, kind)
        facts = hf_facts_of(raw, directory, architecture, config, tree, quantization)
        adapted = adapt(tree, facts.ropes)
        kinds = dict.fromkeys(type(port.module) for port in adapted.mixers)
        facts = replace(facts, keeps=adapted.probe(), mixers=tuple(kinds))
    except UnservedModel as error:
        raise CheckpointError(
            f"{raw.origin}: {architecture} cannot be served: {error.message}", param="architectures"
        ) from error
    return facts


def check_config_class(raw: RawConfig, config: Any, kind: type[PreTrainedModel]) -> None:
    """Raise CheckpointError where `model_type` and `architectures` name two families.

    Some of such trees can be built, with the defaults of the other family.
    """
    asked: Any = kind.config_class
    own = asked is None or not kind.__module__.startswith("transformers.")
    if own or isinstance(config, asked) or isinstance(config.get_text_config(), asked):
        return
    maps = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    if kind in [each.get(type(config), None) for each in maps]:
        return  # families that are another's, with a config of their own
    problem = f"is {raw.get('model_type')!r}, but {kind.__name__} takes {asked.model_type!r}"
    raise raw.error("model_type", problem)


def empty_tree(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """The module tree on the meta device."""
    with torch.device("meta"):
        built = without_towers(kind)._from_config(
            copy.deepcopy(config), attn_implementation="eager"
        )
        return built.eval()


def build_empty(
    raw: RawConfig, config: PreTrainedConfig, kind: type[PreTrainedModel]
) -> PreTrainedModel:
    """The tree without weights. Raises CheckpointError that names a key of config.json, if one."""
    try:
        return empty_tree(config, kind)
    except Exception as error:  # whatever a model class raises about its config
        if isinstance(error, KeyError) and (key := raw.key_of(error.args[0])):
            problem = f"is {error.args[0]!r}, which {kind.__name__} does not know"
            raise raw.error(key, problem) from error
        raise UnservedModel(
            f"transformers cannot build it: {type(error).__name__}: {error}"
        ) from error


def forget_quantization(config: PreTrainedConfig) -> None:
    """Remove it from the config: what is built and loaded has plain weights."""
    for part in (config, config.get_text_config()):
        for key in KEYS:
            if hasattr(part, key):
                delattr(part, key)


def _class_of(
    raw: RawConfig, architecture: str, directory: Path, trust_remote_code: bool
) -> type[PreTrainedModel] | None:
    """The checkpoint's own class if it may be run and there is one, else transformers'."""
    auto_map = raw.part("auto_map") if trust_remote_code else None
    own_code = None if auto_map is None else auto_map.get("AutoModelForCausalLM")
    kind: Any = getattr(transformers, DECODERS.get(architecture, architecture), None)
    if own_code is not None:
        logger.warning("running code of the checkpoint: %s of %s", own_code, directory)
        kind = get_class_from_dynamic_module(own_code, directory, local_files_only=True)
    return kind if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else None


def hf_facts_of(
    raw: RawConfig,
    directory: Path,
    architecture: str,
    config: PreTrainedConfig,
    tree: PreTrainedModel,
    quantization: Quantization | None,
) -> HfFacts:
    """Return what config.json says of it. Raises CheckpointError."""
    text: Any = config.get_text_config()
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return HfFacts(
        architecture=architecture,
        vocab_size=_size(raw, text, "vocab_size"),
        hidden_size=_size(raw, text, "hidden_size"),
        max_position=_max_position(text),
        ropes=length_ropes(raw, text, tree),
        dtype=dtype if isinstance(dtype, str) else None,
        directory=directory,
        config=config,
        kind=type(tree),
        media=MediaFacts(frozenset({AUDIO})) if architecture in DECODERS else media_facts(tree),
        quantization=quantization,
        encoder_states=config.max_source_positions if architecture in DECODERS else 0,
        left_out=_LEFT_OUT.get(architecture, ()),
        extra_layers=extra_layers(raw, getattr(text, "num_hidden_layers", None)),
    )


def _max_position(text: Any) -> int:
    names = ("max_position_embeddings", "max_target_positions")
    longest = next((found for name in names if (found := getattr(text, name, None))), UNBOUNDED)
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or longest
    return stretched(rope.get("rope_type", ""), longest, rope.get("factor") or 1.0, original)


def _size(raw: RawConfig, text: Any, key: str) -> int:
    size = getattr(text, key, None)
    if not isinstance(size, int) or size < 1:
        raise raw.error(key, f"is {size!r}, not a whole number of at least 1")
    return size
