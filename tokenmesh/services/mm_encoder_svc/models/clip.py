"""ClipTower: CLIP's vision transformer up to its hidden states, with CLIP's parameter names.

Shapes: N images, T = 1 + patches (the class token is first), D hidden, H heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from tokenmesh.services.mm_encoder_svc.checkpoint import ConfigReader
from tokenmesh.shared.errors import CheckpointError

Activation = Callable[[torch.Tensor], torch.Tensor]


def quick_gelu(values: torch.Tensor) -> torch.Tensor:
    """OpenAI's approximation of GELU, which CLIP was trained with."""
    return values * torch.sigmoid(1.702 * values)


_BY_NAME: Final[dict[str, Activation]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


def activation(name: str) -> Activation:
    """The function of a name in a checkpoint. Raises CheckpointError for an unknown name."""
    found = _BY_NAME.get(name)
    if found is None:
        known = ", ".join(sorted(_BY_NAME))
        raise CheckpointError(f"the activation {name!r} is not one of {known}")
    return found


@dataclass(frozen=True, slots=True)
class ClipConfig:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    activation: str
    layer_norm_eps: float

    @classmethod
    def read(cls, source: ConfigReader) -> "ClipConfig":
        """From a vision_config, with CLIPVisionConfig's defaults. Raises CheckpointError."""
        config = cls(
            hidden_size=source.size("hidden_size", 768),
            intermediate_size=source.size("intermediate_size", 3072),
            num_layers=source.size("num_hidden_layers", 12),
            num_heads=source.size("num_attention_heads", 12),
            num_channels=source.size("num_channels", 3),
            image_size=source.size("image_size", 224),
            patch_size=source.size("patch_size", 32),
            activation=source.text("hidden_act", "quick_gelu"),
            layer_norm_eps=source.number("layer_norm_eps", 1e-5),
        )
        if config.hidden_size % config.num_heads:
            raise CheckpointError(
                f"vision_config: hidden_size {config.hidden_size} is not a multiple of "
                f"num_attention_heads {config.num_heads}"
            )
        return config

    @property
    def num_patches(self) -> int:
        """Patches of an image; a remainder at the edges is ignored."""
        side: int = self.image_size // self.patch_size
        return side * side


class _Embeddings(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(config.hidden_size))
        self.patch_embedding = nn.Conv2d(
            config.num_channels,
            config.hidden_size,
            kernel_size=config.patch_size,
            stride=config.patch_size,
            bias=False,
        )
        self.position_embedding = nn.Embedding(config.num_patches + 1, config.hidden_size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:  # [N, channels, size, size]
        patches_NTD = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        class_N1D = self.class_embedding.expand(len(pixels), 1, -1)
        embedded: torch.Tensor = torch.cat([class_N1D, patches_NTD], dim=1)
        return embedded + self.position_embedding.weight


class _Attention(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self._num_heads = config.num_heads
        size = config.hidden_size
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def forward(self, hidden_NTD: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            projection(hidden_NTD).unflatten(-1, (self._num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed_NHTd = functional.scaled_dot_product_attention(query, key, value)
        mixed: torch.Tensor = self.out_proj(mixed_NHTd.transpose(1, 2).flatten(-2))
        return mixed


class _Mlp(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self._activation = activation(config.activation)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_NTD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self._activation(self.fc1(hidden_NTD)))
        return out


class _Layer(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = _Mlp(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_NTD: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = hidden_NTD + self.self_attn(self.layer_norm1(hidden_NTD))
        out: torch.Tensor = attended + self.mlp(self.layer_norm2(attended))
        return out


class _Layers(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(config) for _ in range(config.num_layers)])


class ClipTower(nn.Module):
    """Holds every tensor of the checkpoint's tower; runs only the layers that are needed."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        # Misspelled in every CLIP checkpoint.
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = _Layers(config)
        # Used only for CLIP's pooled output, but in every checkpoint.
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixels: torch.Tensor, states: list[int]) -> list[torch.Tensor]:
        """Hidden states [N, T, D] after each of `states` layers, in that order."""
        hidden_NTD = self.pre_layrnorm(self.embeddings(pixels))
        found = {0: hidden_NTD}
        for number, layer in enumerate(self.encoder.layers[: max(states)], start=1):
            hidden_NTD = layer(hidden_NTD)
            if number in states:
                found[number] = hidden_NTD
        return [found[number] for number in states]
