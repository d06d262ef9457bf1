"""Tiny checkpoints with a layer for further tokens, named as published ones are, and its math.

The layer itself is transformers' own; what is around it is plain torch.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from tests.fakes.general_models import GENERAL, HEADS, make_general
from tests.fakes.models import Fake, make_fake, randomized

Weights = dict[str, torch.Tensor]
FILE: Final = "model.safetensors"
_NEXTN: Final = {"num_nextn_predict_layers": 1}


@dataclass(frozen=True, slots=True)
class Predictor:
    """The layer as a family's checkpoints have it."""

    sizes: Mapping[str, Any]
    """Those in which a model that consists of it differs."""
    config: Mapping[str, Any]
    """Keys of config.json that count it."""
    names: tuple[str, str, str, str] = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    """Norms of token and state, projection of both, norm in front of the head."""
    is_module: bool = False
    hands_on_normed: bool = False
    adds_one: bool = False
    fake: Fake | None = None
    """None: that of GENERAL."""


_MODULE: Final = Predictor(
    sizes={"layer_types": ["full_attention"]},
    config={"mtp_num_hidden_layers": 1},
    names=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    is_module=True,
    hands_on_normed=True,
    adds_one=True,
)
_SPARSE: Final = {"mlp_layer_types": ["sparse"]}
_GLM_DSA: Final = Fake(
    "GlmMoeDsa",
    {**GENERAL["deepseek_v32"].sizes, "n_group": 1, "topk_group": 1},
)
PREDICTORS: Final[Mapping[str, Predictor]] = {
    "deepseek_v3": Predictor({"first_k_dense_replace": 0}, _NEXTN),
    "deepseek_v32": Predictor(_SPARSE, _NEXTN),
    "glm_moe_dsa": Predictor({**_SPARSE, "indexer_types": ["full"]}, _NEXTN, fake=_GLM_DSA),
    "glm4_moe": Predictor({"first_k_dense_replace": 0}, _NEXTN),
    "glm4_moe_lite": Predictor(_SPARSE, _NEXTN),
    "exaone_moe": replace(
        _MODULE,
        sizes={"mlp_layer_types": ["dense"], "layer_types": ["sliding_attention"]},
        config=_NEXTN,
        adds_one=False,
    ),
    "qwen3_next": replace(_MODULE, config={}),
    "qwen3_5_text": _MODULE,
    "qwen3_5_moe_text": _MODULE,
}
"""By the family of the model."""


@dataclass(frozen=True, slots=True)
class TinyPredictor:
    """A checkpoint with such a layer."""

    directory: Path
    target: Any
    """transformers' model, which has no such layer."""
    layer: Any
    """transformers' model of the layer alone."""
    around: Weights
    kind: Predictor

    def states(self, token_ids: list[int]) -> torch.Tensor:
        """The final states of the model."""
        out = self.target.model(torch.tensor([token_ids]), use_cache=False)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def chain(self, token_ids: list[int], count: int) -> list[int]:
        """The tokens that it drafts greedily behind others."""
        token, state, merge, norm = self.kind.names
        tokens, states = token_ids[1:], self.states(token_ids)[:-1]
        table, drafts = self.target.get_input_embeddings().weight, list[int]()
        for _ in range(count):
            first = self._norm(table[torch.tensor(tokens)], token)
            both = torch.cat([first, self._norm(states, state)], dim=-1)
            x = both @ self.around[f"{merge}.weight"].T
            out = self.layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            normed = self._norm(out, norm)
            drafts.append(int(self.target.lm_head(normed[-1]).argmax()))
            tokens = [*tokens, drafts[-1]]
            handed = normed if self.kind.hands_on_normed else out
            states = torch.cat([states, handed[-1:]])
        return drafts

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.around[f"{name}.weight"] + float(self.kind.adds_one)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.target.config.rms_norm_eps)
        return x * scale * weight


def make_predictor(directory: Path, name: str, **config: Any) -> TinyPredictor:
    """Write a checkpoint of the family; config: further keys of config.json."""
    kind = PREDICTORS[name]
    if kind.fake is None:
        target, fake = make_general(name), GENERAL[name]
    else:
        target, fake = make_fake(kind.fake, HEADS), kind.fake
    layer = _layer_of(replace(fake, sizes={**fake.sizes, **kind.sizes, "num_hidden_layers": 1}))
    target.save_pretrained(directory)
    layer.save_pretrained(directory / "layer")
    around = _around(kind, target.config.hidden_size)
    depth = target.config.num_hidden_layers
    place = "mtp." if kind.is_module else f"model.layers.{depth}."
    tensors = load_file(directory / FILE) | {f"{place}{n}": each for n, each in around.items()}
    inner = "mtp.layers.0." if kind.is_module else place
    for stored, each in load_file(directory / "layer" / FILE).items():
        if "layers.0." in stored:
            tensors[f"{inner}{stored.split('layers.0.', 1)[1]}"] = each
    if not kind.is_module:
        tensors[f"{place}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{place}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    shutil.rmtree(directory / "layer")
    save_file(tensors, directory / FILE, {"format": "pt"})
    file = directory / "config.json"
    values = {**json.loads(file.read_text()), **kind.config, **config}
    file.write_text(json.dumps(values))
    layer.model.norm = torch.nn.Identity()
    return TinyPredictor(directory, target, layer, around, kind)


def add_module(directory: Path) -> None:
    """Add a layer of Qwen3.5 to a checkpoint that takes images, too."""
    config: Any = AutoConfig.from_pretrained(directory).get_text_config()
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    layer = randomized(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config))
    tensors = load_file(directory / FILE)
    for name, each in layer.state_dict().items():
        if "layers.0." in name:
            tensors[f"mtp.layers.0.{name.split('layers.0.', 1)[1]}"] = each.contiguous()
    for name, each in _around(_MODULE, config.hidden_size).items():
        tensors[f"mtp.{name}"] = each
    save_file(tensors, directory / FILE, {"format": "pt"})
    file = directory / "config.json"
    values = json.loads(file.read_text())
    values["text_config"]["mtp_num_hidden_layers"] = 1
    file.write_text(json.dumps(values))


def _layer_of(fake: Fake) -> Any:
    layer = randomized(make_fake(fake, HEADS))
    with torch.no_grad():
        for parameter in layer.parameters():
            # the model's first layer has the same numbers
            parameter.copy_(parameter.flip(0))
    return layer


def _around(kind: Predictor, width: int) -> Weights:
    generator = torch.Generator().manual_seed(13)
    token, state, merge, norm = kind.names
    around = {
        f"{name}.weight": 0.5 - kind.adds_one + torch.rand(width, generator=generator)
        for name in (token, state, norm)
    }
    drawn = torch.randn(width, 2 * width, generator=generator)
    around[f"{merge}.weight"] = drawn * (2 * width) ** -0.5
    return around
