"""A checkpoint's own processor class of transformers, made without torch."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tokenmesh.services.tokenizer_svc.loading import check_has_tokenizer, read_json
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError

PARTS: Final = frozenset(
    {
        *("image_processor", "video_processor", "feature_extractor", "tokenizer", "chat_template"),
        *("processor_class", "auto_map", "query_prefix", "visual_prompt_prefix"),
    }
)
"""Keys of processor_config.json that are no options of the class."""
_COLQWEN2: Final = "ColQwen2Processor"


def load_processor(directory: Path, config: JsonObject, load_extractor: Callable[[], Any]) -> Any:
    """load_extractor makes what a class needs that takes recordings. Raises CheckpointError."""
    from transformers import AutoImageProcessor, AutoTokenizer

    check_has_tokenizer(directory)
    settings = read_json(directory / "processor_config.json")
    if not (directory / "preprocessor_config.json").is_file() and (
        "image_processor" not in settings
    ):
        raise CheckpointError(f"{directory} holds no preprocessor_config.json")
    try:
        images = AutoImageProcessor.from_pretrained(
            directory, backend="pil", trust_remote_code=False, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
        kind = _without_checks(_class_of(directory, config, settings))
        options = {**_defaults(config), **{k: v for k, v in settings.items() if k not in PARTS}}
        parts = {"image_processor": images, "tokenizer": tokenizer}
        if "video_processor" in kind.get_attributes():
            parts["video_processor"] = SimpleNamespace()
        if "feature_extractor" in kind.get_attributes():
            parts["feature_extractor"] = load_extractor()
        return kind(**parts, **options)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a processor's class raises about its config
        what = f"its processor cannot be loaded: {type(error).__name__}: {error}"
        raise CheckpointError(f"{directory}: {what}"[:1000]) from error


def _class_of(directory: Path, config: JsonObject, settings: JsonObject) -> Any:
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    from tokenmesh.services.tokenizer_svc.media.pixtral import RowsProcessor

    stated = [settings, read_json(directory / "preprocessor_config.json")]
    names = [each.get("processor_class") for each in stated]
    model = str(config.get("model_type")).removesuffix("_thinker")
    names.append(PROCESSOR_MAPPING_NAMES.get(model))
    name = next((each for each in names if isinstance(each, str)), None)
    if name is None:
        raise CheckpointError(f"{directory}: transformers has no processor for it")
    if name == "PixtralProcessor":  # transformers' own imports torch
        return RowsProcessor
    if name == _COLQWEN2:  # likewise; an image is the same in both
        return transformers.Qwen2VLProcessor
    return getattr(transformers, name)


def _without_checks(kind: Any) -> Any:
    """The class, taking a stand-in for its video processor and a placeholder alone as the text."""

    def accept(_self: Any, *_args: Any, **_named: Any) -> None: ...

    members = {"check_argument_for_proper_class": accept, "validate_inputs": accept}
    return type(kind.__name__, (kind,), members)


def _defaults(config: JsonObject) -> JsonObject:
    """Options that old checkpoints of llava leave out of their processor's config."""
    vision = config.get("vision_config")
    if config.get("model_type") != "llava" or not isinstance(vision, dict):
        return {}
    strategy = config.get("vision_feature_select_strategy", "default")
    return {
        # CLIPVisionConfig's own default
        "patch_size": vision.get("patch_size", 32),
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": int(vision.get("model_type") == "clip_vision_model"),
    }
