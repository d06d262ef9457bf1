"""The layer behind a model's last one, in the model's own checkpoint -> MtpHead.

transformers leaves its tensors out. It is built as a model of the same family that has one layer,
by transformers' code, and reads its tensors by other names.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from tokenmesh.engine.media_facts import TEXT_ONLY
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.extra_layers import counted
from tokenmesh.engine.models.heads.mtp import MtpHead
from tokenmesh.engine.models.load import load_model
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.engine.models.tree.facts import HfFacts
from tokenmesh.kernels.linear import pack
from tokenmesh.shared.errors import CheckpointError

_VOCAB: Final = 64
"""Rows of an embedding table that only the check of a loaded layer reads."""
_APART: Final = "mtp."
"""Before the names of what is around the layer, whatever the checkpoint calls it."""
_LAYER: Final = "model.layers.0."
_FULL: Final = "full_attention"
_MODULE: Final = re.compile(r"(?:^|\.)mtp\.(?:layers\.(?P<number>\d+)\.)?(?P<name>.+)$")


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """Says where a family's checkpoints have the layer, and what its model code does around it."""

    token_norm: str
    state_norm: str
    merge: str
    norm: str
    is_numbered: bool = False
    """Its tensors are those of one more layer; else those of a module `mtp`."""
    hands_on_normed: bool = False
    """See `MtpHead.hands_on_normed`."""
    adds_one: bool = False
    """A norm multiplies by 1 plus its weight."""
    is_dense: bool = False
    """The layer has no experts where the others do."""
    layer_type: str | None = None
    """None: that of the model's last layer."""
    default_count: int = 0
    """Layers of a config that does not count them."""


_DEEPSEEK: Final = MtpFamily("enorm", "hnorm", "eh_proj", "shared_head.norm", is_numbered=True)
_QWEN: Final = MtpFamily(
    *("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    hands_on_normed=True,
    adds_one=True,
    layer_type=_FULL,
)
FAMILIES: Final[Mapping[str, MtpFamily]] = {
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite"), _DEEPSEEK
    ),
    "exaone_moe": replace(_QWEN, adds_one=False, is_dense=True, layer_type=None),
    # its config.json has no number of them
    "qwen3_next": replace(_QWEN, default_count=1),
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}
"""By the type of the language model's config."""


@dataclass(frozen=True, slots=True)
class MtpFacts:
    """The layer, as config.json describes it."""

    family: MtpFamily
    depth: int
    """Layers of the model itself."""
    text: HfFacts
    """They describe the layer as if it were a model."""
    position_rows: int


def read_mtp(raw: RawConfig, target: Any, num_drafts: int) -> MtpFacts:
    """target: the facts of the model. Raises CheckpointError for one without such a layer, and for
    several of them where more than one draft of a row is wanted."""
    known = ", ".join(FAMILIES)
    if not isinstance(target, HfFacts):
        raise raw.error("model_type", f"is {raw.get('model_type')}; MTP heads are of {known}")
    config = target.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise raw.error("model_type", f"is {config.model_type}; MTP heads are of {known}")
    key, count = counted(raw)
    if not (count or (family.default_count and key not in raw.values)):
        others = "and no other key counts layers that predict further tokens"
        raise raw.error(key, f"is not set, {others}")
    if count > 1 and num_drafts > 1:
        # the later ones have read other tokens, and keep keys of their own for them
        raise raw.error(
            key,
            f"is {count}, and only the first of several such layers drafts: "
            f"num_speculative_tokens has to be 1, not {num_drafts}",
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = replace(
        target,
        vocab_size=_VOCAB,
        config=_one_layer(config, family),
        kind=_without_ends(kind),
        mixers=(),
        left_out=(_APART,),
        extra_layers=range(0),
        rounding=None,
        media=TEXT_ONLY,
    )
    return MtpFacts(family, config.num_hidden_layers, text, target.media.position_rows)


def _one_layer(config: Any, family: MtpFamily) -> Any:
    """The config of a model whose only layer is like the head's."""
    kind = family.layer_type
    if kind is None and family.is_dense:
        kind = (getattr(config, "mtp_layer_types", None) or config.layer_types)[0]
    types = getattr(config, "layer_types", None) or [_FULL]
    values = {
        "num_hidden_layers": 1,
        "vocab_size": _VOCAB,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "layer_types": [kind or types[-1]],
        "mlp_layer_types": ["dense" if family.is_dense else "sparse"],
        "first_k_dense_replace": 0,
        "indexer_types": ["full"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    one = copy.deepcopy(config)
    for key, value in values.items():
        if getattr(one, key, None) is not None:
            setattr(one, key, value)
    return one


def _without_ends(kind: Any) -> type[PreTrainedModel]:
    """A class whose trees have no norm and no head behind the layers, and embeddings that no
    checkpoint brings."""

    def build(self: Any, config: Any, *args: Any, **named: Any) -> None:
        kind.__init__(self, config, *args, **named)
        self.model.norm = torch.nn.Identity()
        self.lm_head = torch.nn.Identity()

    named = {
        "__init__": build,
        "__module__": kind.__module__,
        "tokenmesh_towers": ("embed_tokens",),
        "_tied_weights_keys": None,
        "_keys_to_ignore_on_load_unexpected": None,
    }
    return type(kind.__name__, (kind,), named)


@dataclass(frozen=True, slots=True)
class MtpLoader:
    """Reads the weights of the layer and of what is around it."""

    facts: MtpFacts
    directory: Path
    device: torch.device
    buffer_bytes: int
    target: LanguageModel
    native: bool

    def load(self) -> MtpHead:
        """Raises CheckpointError for any tensor that is missing, misshapen or unknown."""
        facts, family = self.facts, self.facts.family
        name_of = self._names()
        checkpoint = Checkpoint(
            *(self.directory, self.device, self.buffer_bytes, ()),
            lambda name: name_of(name) is None,
            lambda name: name_of(name) or name,
        )
        if not len(checkpoint):
            where = f"model.layers.{facts.depth}." if family.is_numbered else "mtp."
            problem = f"has no tensors of {where}, which predicts further tokens"
            raise CheckpointError(f"{self.directory} {problem}")
        dtype, width = self.target.dtype, self.target.facts.hidden_size
        layer = load_model(facts.text, checkpoint, dtype, lambda done, total: None, self.native)

        def norm(name: str) -> torch.Tensor:
            weight = checkpoint.take(f"{_APART}{name}.weight", (width,), torch.float32)
            return weight.add_(1.0) if family.adds_one else weight

        merge = checkpoint.take(f"{_APART}{family.merge}.weight", (width, 2 * width), dtype)
        return MtpHead(
            target=self.target,
            layer=layer,
            token_norm=norm(family.token_norm),
            state_norm=norm(family.state_norm),
            merge=pack(merge, None, self.native),
            norm=norm(family.norm),
            eps=facts.text.config.rms_norm_eps,
            hands_on_normed=family.hands_on_normed,
            position_rows=facts.position_rows,
        )

    def _names(self) -> Callable[[str], str | None]:
        """By what name a tensor is taken; None: it is not of the first such layer."""
        family = self.facts.family
        around = (family.token_norm, family.state_norm, family.merge, family.norm)
        numbered = re.compile(rf"(?:^|\.)layers\.{self.facts.depth}\.(?P<name>.+)$")

        def name_of(stored: str) -> str | None:
            found = (numbered if family.is_numbered else _MODULE).search(stored)
            if found is None:
                return None
            name, number = found["name"], found.groupdict().get("number")
            if name.startswith(tuple(f"{each}." for each in around)) and number is None:
                return f"{_APART}{name}"
            if family.is_numbered:
                # copies of the model's own
                is_copy = name.startswith(("embed_tokens.", "shared_head.head."))
                return None if is_copy else f"{_LAYER}{name}"
            return f"{_LAYER}{name}" if number == "0" else None

        return name_of
