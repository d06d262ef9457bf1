"""LlavaEncoder: CLIP's hidden states of some layers, through a two-layer projector."""

from dataclasses import dataclass

import torch
from torch import nn

from tokenmesh.services.mm_encoder_svc.checkpoint import ConfigReader
from tokenmesh.services.mm_encoder_svc.models.clip import ClipConfig, ClipTower, activation
from tokenmesh.shared.errors import CheckpointError

_DROPS_CLASS_TOKEN = {"default": True, "full": False}
"""By vision_feature_select_strategy."""


@dataclass(frozen=True, slots=True)
class LlavaConfig:
    tower: ClipConfig
    feature_states: list[int]
    """The number of layers before each selected hidden state."""
    drops_class_token: bool
    text_hidden_size: int
    activation: str
    projector_bias: bool

    @classmethod
    def read(cls, source: ConfigReader) -> "LlavaConfig":
        """From a config.json. Raises CheckpointError that names the key."""
        vision = source.section("vision_config")
        tower = ClipConfig.read(vision)
        strategy = source.text("vision_feature_select_strategy", "default")
        if strategy not in _DROPS_CLASS_TOKEN:
            raise CheckpointError(f"vision_feature_select_strategy {strategy!r} is not supported")
        return cls(
            tower=tower,
            feature_states=[
                _state(layer, tower.num_layers)
                for layer in source.layers("vision_feature_layer", -2)
            ],
            drops_class_token=_DROPS_CLASS_TOKEN[strategy],
            text_hidden_size=source.section("text_config").size("hidden_size", 4096),
            activation=source.text("projector_hidden_act", "gelu"),
            projector_bias=source.flag("multimodal_projector_bias", True),
        )

    @property
    def tokens_per_image(self) -> int:
        """Embeddings, and therefore placeholders, of one image."""
        return self.tower.num_patches + (0 if self.drops_class_token else 1)


class _Projector(nn.Module):
    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        features = config.tower.hidden_size * len(config.feature_states)
        size, bias = config.text_hidden_size, config.projector_bias
        self._activation = activation(config.activation)
        self.linear_1 = nn.Linear(features, size, bias=bias)
        self.linear_2 = nn.Linear(size, size, bias=bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear_2(self._activation(self.linear_1(features)))
        return out


class LlavaEncoder(nn.Module):
    """Pixels [N, channels, size, size] to embeddings [N, tokens_per_image, text hidden]."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = ClipTower(config.tower)
        self.multi_modal_projector = _Projector(config)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        states = self.vision_tower(pixels, self.config.feature_states)
        if self.config.drops_class_token:
            states = [state[:, 1:] for state in states]
        out: torch.Tensor = self.multi_modal_projector(torch.cat(states, dim=-1))
        return out


def _state(layer: int, num_layers: int) -> int:
    """A layer number in a config: negative from the end, 0 for the embeddings."""
    state = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 <= state <= num_layers:
        raise CheckpointError(
            f"vision_feature_layer {layer} is out of range for a tower of {num_layers} layers"
        )
    return state
