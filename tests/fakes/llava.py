"""A tiny llava checkpoint: random CLIP tower, projector and Llama, tokenizer, image processor."""

from pathlib import Path

from tests.fakes.tokenizers import byte_level_bpe, write_json

IMAGE_TOKEN = "<image>"
IMAGE_SIZE = 30
PATCH_SIZE = 6
NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2

TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def llava_without_weights(directory: Path, **overrides: object) -> Path:
    """All that tokenizer_svc reads. `overrides` go into config.json."""
    byte_level_bpe(directory, IMAGE_TOKEN)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    write_json(directory / "config.json", {**config(), **overrides})
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": IMAGE_SIZE},
        "crop_size": size,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    write_json(directory / "preprocessor_config.json", processor)
    return directory


def config() -> dict[str, object]:
    """The checkpoint's config.json."""
    text = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
    }
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 3,
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
        "text_config": text,
        "vision_config": vision,
    }


def llava(directory: Path, **overrides: object) -> Path:
    """The whole checkpoint, weights drawn from a fixed seed."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    llava_without_weights(directory, **overrides)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(directory))
    # The default initialization leaves biases and class embedding at values that hide mistakes.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    # save_pretrained rewrites config.json with defaults filled in; keep what was asked for.
    write_json(directory / "config.json", {**config(), **overrides})
    return directory
