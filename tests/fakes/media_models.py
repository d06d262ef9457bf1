"""Tiny random checkpoints of models that take images: weights, tokenizer and processor's config.

Sizes are such that an image is a few rows of tokens; weights are far from neutral.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.fakes.general_models import GENERAL, HEADS
from tests.fakes.media_checkpoint import TEXT, loaded, with_weights, write_tokenizer_config
from tests.fakes.tokenizers import byte_level_bpe, write_json

_QWEN_TOKENS: Final = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_OMNI_TOKENS: Final = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_MEAN: Final = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
_QWEN_IMAGES: Final[Mapping[str, Any]] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 2048},
    **_MEAN,
}
_QWEN_VISION: Final[Mapping[str, Any]] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_QWEN3_VISION: Final[Mapping[str, Any]] = {**_QWEN_VISION, "num_position_embeddings": 64}
_QWEN3_VIDEOS: Final[Mapping[str, Any]] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": 4,
    "size": {"shortest_edge": 512, "longest_edge": 6144},
    **_MEAN,
}
_MROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True, slots=True)
class MediaFake:
    """A checkpoint to make."""

    kind: str
    """Model type in config.json."""
    architecture: str
    text: Mapping[str, Any]
    """Sizes of the language model, in addition to those of all."""
    vision: Mapping[str, Any]
    processor: str
    """Name of transformers' class of the whole processor."""
    images: Mapping[str, Any]
    """preprocessor_config.json"""
    tokens: Mapping[str, str]
    """Special tokens by their attribute of the tokenizer."""
    ids: Mapping[str, str]
    """Key of config.json -> the attribute of the token that it names."""
    placeholder: str
    """The text that the chat template writes for an image."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of config.json."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of processor_config.json."""
    videos: Mapping[str, Any] = field(default_factory=dict)
    """video_preprocessor_config.json; empty: there is none."""

    @property
    def video_placeholder(self) -> str:
        """Return the chat template's text for a video; empty for a model of images."""
        texts = self.tokens
        if not {"image_token", "video_token"} <= texts.keys():
            return ""
        return self.placeholder.replace(texts["image_token"], texts["video_token"])

    @property
    def audio_placeholder(self) -> str:
        """Return the text that the chat template writes for a recording."""
        names = ("audio_bos_token", "audio_token", "audio_eos_token")
        return "".join(self.tokens.get(name, "") for name in names)


def _qwen(kind: str, architecture: str, **changes: Any) -> MediaFake:
    values: dict[str, Any] = {
        "kind": kind,
        "architecture": f"{architecture}ForConditionalGeneration",
        "text": {"rope_parameters": _MROPE},
        "vision": _QWEN_VISION,
        "processor": "Qwen2VLProcessor",
        "images": _QWEN_IMAGES,
        "tokens": _QWEN_TOKENS,
        "ids": {
            "image_token_id": "image_token",
            "video_token_id": "video_token",
            "vision_start_token_id": "vision_start_token",
            "vision_end_token_id": "vision_end_token",
        },
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
        **changes,
    }
    return MediaFake(**values)


_DELTA: Final = {**GENERAL["qwen3_5_text"].sizes}
_QWEN3_MROPE: Final = {"rope_parameters": {**_MROPE, "mrope_interleaved": True}}
_QWEN35: Final[Mapping[str, Any]] = {
    **_DELTA,
    "head_dim": 32,
    "rope_parameters": {
        **_MROPE,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}

MEDIA: Final[Mapping[str, MediaFake]] = {
    "llava": MediaFake(
        kind="llava",
        architecture="LlavaForConditionalGeneration",
        text={"model_type": "llama"},
        vision={
            "model_type": "clip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": 30,
            "patch_size": 6,
        },
        processor="LlavaProcessor",
        images={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 30},
            "crop_size": {"height": 30, "width": 30},
            **_MEAN,
        },
        tokens={"image_token": "<image>"},
        ids={"image_token_index": "image_token"},
        placeholder="<image>",
        more={"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        options={
            "patch_size": 6,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "qwen2_vl": _qwen(
        "qwen2_vl", "Qwen2VL", vision={**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64}
    ),
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl",
        "Qwen2_5_VL",
        processor="Qwen2_5_VLProcessor",
        vision={**_QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 16},
    ),
    "qwen3_vl": _qwen(
        "qwen3_vl",
        "Qwen3VL",
        processor="Qwen3VLProcessor",
        videos=_QWEN3_VIDEOS,
        text=_QWEN3_MROPE,
        vision={**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_vl_moe": _qwen(
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        processor="Qwen3VLProcessor",
        videos=_QWEN3_VIDEOS,
        text={
            **_QWEN3_MROPE,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        vision={**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": _qwen(
        "qwen3_5",
        "Qwen3_5",
        processor="Qwen3VLProcessor",
        videos=_QWEN3_VIDEOS,
        text=_QWEN35,
        vision=_QWEN3_VISION,
    ),
    "qwen3_5_moe": _qwen(
        "qwen3_5_moe",
        "Qwen3_5Moe",
        processor="Qwen3VLProcessor",
        videos=_QWEN3_VIDEOS,
        text={**_QWEN35, **GENERAL["qwen3_5_moe_text"].sizes, "head_dim": 32},
        vision=_QWEN3_VISION,
    ),
    "qwen3_omni_moe_thinker": _qwen(
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinker",
        processor="Qwen3OmniMoeProcessor",
        images={**_QWEN_IMAGES, "feature_size": 16},
        videos={"patch_size": 4, **_MEAN},
        text={
            **_QWEN3_MROPE,
            "model_type": "qwen3_omni_moe_text",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        vision={**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        tokens=_OMNI_TOKENS,
        ids={
            **{f"{name}_token_id": f"{name}_token" for name in ("image", "video", "audio")},
            "vision_start_token_id": "vision_bos_token",
            "audio_start_token_id": "audio_bos_token",
        },
        more={
            "position_id_per_seconds": 13,
            "audio_config": {
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "output_dim": 64,
                "n_window_infer": 200,
                "downsample_hidden_size": 8,
                "max_source_positions": 200,
            },
        },
    ),
    "gemma3": MediaFake(
        kind="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        text={
            **GENERAL["gemma3_text"].sizes,
            "model_type": "gemma3_text",
            "sliding_window": 12,
        },
        vision={
            "model_type": "siglip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 32,
            "patch_size": 4,
        },
        processor="Gemma3Processor",
        images={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
            **_MEAN,
        },
        tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        ids={
            "boi_token_index": "boi_token",
            "eoi_token_index": "eoi_token",
            "image_token_index": "image_token",
        },
        placeholder="<start_of_image>",
        more={"mm_tokens_per_image": 16},
        options={"image_seq_length": 16},
    ),
    "internvl": MediaFake(
        kind="internvl",
        architecture="InternVLForConditionalGeneration",
        text={"model_type": "qwen2"},
        vision={
            "model_type": "internvl_vision",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": [16, 16],
            "patch_size": [4, 4],
        },
        processor="InternVLProcessor",
        images={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 16, "width": 16},
            "crop_to_patches": True,
            "max_patches": 4,
            **_MEAN,
        },
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        ids={"image_token_id": "context_image_token"},
        placeholder="<IMG_CONTEXT>\n",
        more={"image_seq_length": 4, "downsample_ratio": 0.5},
        options={"image_seq_length": 4},
    ),
    "mistral3": MediaFake(
        kind="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        text={"model_type": "mistral"},
        vision={
            "model_type": "pixtral",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 12,
            "image_size": 64,
            "patch_size": 4,
        },
        processor="PixtralProcessor",
        images={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 40},
            "patch_size": {"height": 8, "width": 8},
            **_MEAN,
        },
        tokens={
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        ids={"image_token_index": "image_token"},
        placeholder="[IMG]",
        more={"spatial_merge_size": 2},
        options={"patch_size": 4, "spatial_merge_size": 2},
    ),
    "hunyuan_vl": MediaFake(
        kind="hunyuan_vl",
        architecture="HunYuanVLForConditionalGeneration",
        text={
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 50.0,
                "factor": 1.0,
                "mrope_section": [2, 2, 2, 2],
            }
        },
        vision={
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "out_hidden_size": 64,
            "text_hidden_size": 64,
            "max_image_size": 64,
            "min_image_size": 16,
        },
        processor="HunYuanVLProcessor",
        images={
            "image_processor_type": "HunYuanVLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "min_pixels": 256,
            "max_pixels": 2048,
            "size": {"shortest_edge": 256, "longest_edge": 2048},
            **_MEAN,
        },
        tokens={
            "image_token": "<img_pad>",
            "image_start_token": "<img_start>",
            "image_end_token": "<img_end>",
            "pad_token": "<|endoftext|>",
        },
        ids={
            "image_token_id": "image_token",
            "im_start_id": "image_start_token",
            "im_end_id": "image_end_token",
        },
        placeholder="<img_start><img_pad><img_end>",
    ),
}
"""By the model type in config.json."""


def token_ids(fake: MediaFake) -> dict[str, int]:
    """The id of each special token by its attribute."""
    texts = [text for text in dict.fromkeys(fake.tokens.values()) if text != "<|endoftext|>"]
    by_text = {text: 3 + number for number, text in enumerate(texts)} | {"<|endoftext|>": 0}
    return {name: by_text[text] for name, text in fake.tokens.items()}


def without_weights(directory: Path, name: str) -> Path:
    """All that a tokenizer service reads, and config.json."""
    fake = MEDIA[name]
    texts = [text for text in dict.fromkeys(fake.tokens.values()) if text != "<|endoftext|>"]
    byte_level_bpe(directory, *texts)
    placeholders = fake.placeholder, fake.video_placeholder, fake.audio_placeholder
    write_tokenizer_config(directory, fake.tokens, *placeholders)
    write_json(directory / "preprocessor_config.json", fake.images)
    if fake.videos:
        write_json(directory / "video_preprocessor_config.json", fake.videos)
    options = {"processor_class": fake.processor, **fake.options}
    write_json(directory / "processor_config.json", options)
    ids = token_ids(fake)
    text = {**TEXT, **HEADS, **fake.text}
    config = {
        "architectures": [fake.architecture],
        "model_type": fake.kind,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": dict(fake.vision),
        **{key: ids[name] for key, name in fake.ids.items()},
        **fake.more,
    }
    write_json(directory / "config.json", config)
    return directory


def media_checkpoint(directory: Path, name: str) -> Path:
    """The whole checkpoint."""
    return with_weights(without_weights(directory, name), MEDIA[name].architecture)


def oracle(directory: Path, name: str) -> Any:
    """transformers' own model of the checkpoint."""
    return loaded(directory, MEDIA[name].architecture)
