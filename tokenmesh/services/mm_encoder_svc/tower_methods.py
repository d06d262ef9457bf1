"""Finds the method that embeds each kind of item: one of the checkpoint's class, or ours.

Some classes of transformers compute them within their forward only; `_OWN` has these parts.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers.masking_utils import create_bidirectional_mask

from tokenmesh.shared.messages.media import AUDIO, IMAGE, VIDEO

_METHODS: Final = {
    IMAGE: "get_image_features",
    VIDEO: "get_video_features",
    AUDIO: "get_audio_features",
}

CAUSAL: Final = ("voxtral_realtime",)
"""Model types whose towers hear nothing ahead: speech is encoded in parts while it goes on."""


def rows_of(found: Any) -> torch.Tensor:
    """A tensor [..., width], or one for each item, as [n, width]."""
    parts = [found] if isinstance(found, torch.Tensor) else list(found)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def methods_of(model: Any) -> dict[str, Any]:
    """By kind of item, what computes its embeddings."""
    places = (model.base_model, model)
    found = {
        kind: next((getattr(each, name) for each in places if hasattr(each, name)), None)
        for kind, name in _METHODS.items()
    }
    if encoder_states_of(model.config):
        found[AUDIO] = partial(_encoded, model.get_encoder())
    for kind, own in _OWN.get(model.config.model_type, {}).items():
        found[kind] = partial(own, model.base_model)
    return {kind: method for kind, method in found.items() if method is not None}


def encoder_states_of(config: Any) -> int:
    """States of the encoder of an encoder-decoder; 0 for other models."""
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    return int(config.max_source_positions) if is_encoder_decoder else 0


def _encoded(encoder: Any, input_features: torch.Tensor, return_dict: bool) -> SimpleNamespace:
    """As the methods of other models return it."""
    states = encoder(input_features, return_dict=return_dict).last_hidden_state
    return SimpleNamespace(pooler_output=states)


def _qwen2_audio(
    model: Any,
    input_features: torch.Tensor,
    feature_attention_mask: torch.Tensor,
    return_dict: bool,
) -> SimpleNamespace:
    """As Qwen2AudioModel.forward computes it before it merges, for which it has no method."""
    states = (feature_attention_mask.sum(-1) - 1) // 2 + 1
    length = (input_features.shape[-1] - 2) // 2 + 1
    places = torch.arange(length, device=states.device)[None]
    mask = create_bidirectional_mask(
        config=model.audio_tower.config,
        inputs_embeds=input_features.new_zeros(len(input_features), length, 1),
        attention_mask=(places < states[:, None]).long(),
    )
    encoded = model.audio_tower(input_features, attention_mask=mask, return_dict=return_dict)
    features = model.multi_modal_projector(encoded.last_hidden_state)
    is_kept = places[:, : features.shape[1]] < ((states - 2) // 2 + 1)[:, None]
    return SimpleNamespace(pooler_output=features[is_kept])


def _with_sound(
    model: Any,
    pixel_values_videos: torch.Tensor,
    video_grid_thw: torch.Tensor,
    return_dict: bool,
    input_features: torch.Tensor | None = None,
    feature_attention_mask: torch.Tensor | None = None,
    is_sound: torch.Tensor | None = None,
) -> Any:
    """Frames of videos, and their sound between the frames where `is_sound` [tokens] is 1.

    Layers that frames are added to get nothing of the sound.
    """
    frames = model.get_video_features(pixel_values_videos, video_grid_thw, return_dict=return_dict)
    if is_sound is None:
        return frames
    sound = model.get_audio_features(
        input_features, feature_attention_mask, return_dict=return_dict
    ).last_hidden_state
    heard = is_sound.bool()

    def mixed(seen: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
        rows = seen.new_empty(len(heard), seen.shape[1])
        rows[~heard], rows[heard] = seen, other
        return rows

    layers = getattr(frames, "deepstack_features", None) or ()
    return SimpleNamespace(
        pooler_output=mixed(rows_of(frames.pooler_output), sound),
        deepstack_features=[mixed(rows_of(layer), 0.0) for layer in layers],
    )


_OWN: Final[dict[str, dict[str, Callable[..., Any]]]] = {
    "qwen2_audio": {AUDIO: _qwen2_audio},
    "qwen3_omni_moe_thinker": {VIDEO: _with_sound},
}
"""By model type and kind."""
