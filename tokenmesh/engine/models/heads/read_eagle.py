"""A checkpoint of an EAGLE or EAGLE-3 head -> its facts, and its weights -> EagleHead."""

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

from tokenmesh.engine.adapters.sites import AdapterSites
from tokenmesh.engine.layers.rotary import Rotary
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.heads.eagle import EagleHead, Joint, build_head_program
from tokenmesh.engine.models.native.build_decoder import LayerLoader
from tokenmesh.engine.models.native.config import Names
from tokenmesh.engine.models.native.read_config import NativeFacts, read_facts
from tokenmesh.engine.models.native.registry import FAMILIES
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.kernels.linear import Linear, pack, pack_codes
from tokenmesh.kernels.linear.formats.round import Grid, rounded
from tokenmesh.shared.errors import CheckpointError

Kind = Literal["eagle", "eagle3"]

TARGETS: Final = ("llama", "qwen", "minicpm", "hunyuan_vl", "hunyuan_v1_dense")
"""It holds what the model type of a model with an EAGLE-3 head begins with."""
_LAYER_KEYS: Final = "eagle_aux_hidden_state_layer_ids"
_IGNORED: Final = ("t2d",)
"""The other direction of `d2t`."""


@dataclass(frozen=True, slots=True)
class EagleFacts:
    """It holds what a head's config.json says."""

    kind: Kind
    text: NativeFacts
    """These are the facts of its layers, as those of a decoder."""
    taps: tuple[int, ...]
    """See `EagleHead.taps`."""
    draft_vocab_size: int
    adds_normed: bool
    target_hidden_size: int
    num_trained: int | None
    """It was trained for so many drafts; None: it does not say."""


def read_eagle(
    raw: RawConfig, kind: Kind, layers: tuple[int, ...] | None, target: RawConfig
) -> EagleFacts:
    """layers: of whose inputs an EAGLE-3 head reads states, in place of those that its config says.
    target: the config of the model. Raises CheckpointError."""
    depth = target_text(target).integer("num_hidden_layers")
    values = {**(raw.get("transformer_layer_config") or {}), **raw.values}
    names = values.get("architectures") or []
    is_known = bool(names) and names[0] in FAMILIES
    values["architectures"] = [names[0] if is_known else "LlamaForCausalLM"]
    text = read_facts(RawConfig(values, raw.origin))
    nested = raw.get("eagle_config") or {}
    taps: tuple[int, ...] = ()
    if kind == "eagle3":
        check_target(target)
        if nested.get("use_aux_hidden_state", True):
            own = raw.get(_LAYER_KEYS) or nested.get(_LAYER_KEYS)
            taps = tuple(layers or own or (2, depth // 2, depth - 3))
            wrong = [each for each in taps if each not in range(depth)]
            if wrong:
                raise raw.error(
                    _LAYER_KEYS, f"has {wrong[0]}; the model has layers 0 to {depth - 1}"
                )
    elif layers:
        raise raw.error(_LAYER_KEYS, "is for heads of EAGLE-3; one of EAGLE reads final states")
    hidden_size = target_text(target).integer("hidden_size")
    return EagleFacts(
        kind=kind,
        text=text,
        taps=taps,
        draft_vocab_size=raw.integer("draft_vocab_size", text.vocab_size),
        adds_normed=raw.flag("norm_before_residual", "speculators_model_type" in raw.values),
        target_hidden_size=raw.integer("target_hidden_size", hidden_size),
        num_trained=_num_trained(raw),
    )


def _num_trained(raw: RawConfig) -> int | None:
    """Return for how many drafts a head was trained, as those of vLLM's speculators say."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or ()
    counts = [each.get("speculative_tokens") for each in methods]
    return max((each for each in counts if isinstance(each, int)), default=None)


def target_text(raw: RawConfig) -> RawConfig:
    """The part of a model's config that is about its language model."""
    return raw.part("text_config") or raw


def check_target(raw: RawConfig) -> None:
    """Raise CheckpointError for a model that EAGLE-3 heads are not made for."""
    kind = str(raw.get("model_type"))
    if not kind.startswith(TARGETS) and not str(target_text(raw).get("model_type")).startswith(
        TARGETS
    ):
        known = ", ".join(TARGETS)
        raise raw.error("model_type", f"is {kind}; EAGLE-3 heads are for {known}")


@dataclass(frozen=True, slots=True)
class EagleLoader:
    """Reads the weights of a head."""

    facts: EagleFacts
    checkpoint: Checkpoint
    target: LanguageModel
    dtype: torch.dtype
    native: bool
    rounding: Grid | None = None
    """Its weights are rounded to these where those of the model are codes, too: a head is read
    several times a step."""

    def load(self) -> EagleHead:
        """Raises CheckpointError for any tensor that is missing, misshapen or unknown."""
        facts, config = self.facts, self.facts.text.config
        prefix = "model." if "model.fc.weight" in self.checkpoint else ""
        is_third = facts.kind == "eagle3"
        layer = "midlayer." if f"{prefix}midlayer.mlp.down_proj.weight" in self.checkpoint else None
        names = Names(model=prefix, layer=layer or Names().layer)
        # the first layer of EAGLE has no norm before its attention
        plain = replace(facts.text.family.names, attention_norm=None)
        text = facts.text
        first = replace(text, family=replace(text.family, names=plain))
        layers = []
        for number, each in enumerate(config.layers):
            loader = LayerLoader(
                text if number else first,
                *(config, names, self.checkpoint, self.dtype, self.native),
                *(AdapterSites(), self.rounding),
                joined=is_third and not number,
            )
            layers.append(loader.load(number, each))
        width = config.hidden_size
        joint = None
        if is_third:
            within = f"{prefix}{names.layer.format(0)}"
            joint = Joint(
                self._norm(f"{within}input_layernorm"),
                self._norm(f"{within}hidden_norm"),
                facts.adds_normed,
            )
        embedding = self._embedding(f"{prefix}embed_tokens.weight", width, is_third=is_third)
        head, ids = self._head(width) if is_third else (None, None)
        found = EagleHead(
            config=config,
            dtype=self.dtype,
            target=self.target,
            taps=facts.taps,
            merge=self._merge(f"{prefix}fc", width),
            layers=layers,
            rotaries=[Rotary(rope, self.checkpoint.device) for rope in config.ropes],
            joint=joint,
            norm=self._norm(f"{prefix}norm") if is_third else None,
            embedding=embedding,
            head=head,
            token_ids=ids,
            program=build_head_program(config, layers, joint, self.dtype),
        )
        left = (f"{prefix}embed_tokens.", "lm_head.") if not is_third else ()
        self.checkpoint.finish((*_IGNORED, "d2t", *left))
        return found

    def _norm(self, name: str) -> torch.Tensor:
        size = self.facts.text.config.hidden_size
        return self.checkpoint.take(f"{name}.weight", (size,), torch.float32)

    def _merge(self, name: str, width: int) -> Linear | None:
        facts = self.facts
        if facts.kind == "eagle":
            inputs = width + facts.target_hidden_size
        elif facts.taps:
            inputs = len(facts.taps) * facts.target_hidden_size
        else:
            return None
        weight = self.checkpoint.take(f"{name}.weight", (width, inputs), self.dtype)
        bias = None
        if f"{name}.bias" in self.checkpoint:
            bias = self.checkpoint.take(f"{name}.bias", (width,), self.dtype)
        return self._pack(weight, bias)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if self.rounding is None:
            return pack(weight, bias, self.native)
        return pack_codes(rounded(weight, self.rounding), bias, self.dtype, self.native)

    def _embedding(self, name: str, width: int, *, is_third: bool) -> torch.Tensor | None:
        """The model's own where the head brings none, and for EAGLE, whose copy is the same."""
        has_own = is_third and name in self.checkpoint
        if not has_own and self.target.facts.hidden_size != width:
            problem = f"has no {name}, and the model's embeddings have another size than {width}"
            raise CheckpointError(f"{self.checkpoint.directory} {problem}")
        if not has_own:
            return None
        return self.checkpoint.take(name, (self.facts.text.vocab_size, width), self.dtype)

    def _head(self, width: int) -> tuple[Linear | None, torch.Tensor | None]:
        size, vocab = self.facts.draft_vocab_size, self.target.facts.vocab_size
        if "lm_head.weight" not in self.checkpoint:
            if self.target.facts.hidden_size != width:
                problem = "has no lm_head.weight, and the model's has another size"
                raise CheckpointError(f"{self.checkpoint.directory} {problem}")
            return None, None
        head = self._pack(self.checkpoint.take("lm_head.weight", (size, width), self.dtype), None)
        part = self.checkpoint.part("d2t")
        if part is None:
            if size != vocab:
                problem = f"has logits of {size} tokens and no d2t that says which of {vocab}"
                raise CheckpointError(f"{self.checkpoint.directory} {problem}")
            return head, None
        ids = torch.arange(size) + part.read().long()
        if len(ids) != size or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            problem = f"has a d2t that does not name {size} of {vocab} tokens"
            raise CheckpointError(f"{self.checkpoint.directory} {problem}")
        return head, ids


def directory_kind(raw: RawConfig) -> Kind | None:
    """Return what a checkpoint's config says that it is; None: no head."""
    names = " ".join(map(str, raw.get("architectures") or [])).lower()
    stated = f"{names} {raw.get('speculators_model_type') or ''} {raw.get('model_type') or ''}"
    if "eagle3" in stated:
        return "eagle3"
    return "eagle" if "eagle" in stated else None
