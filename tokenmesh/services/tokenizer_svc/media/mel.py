"""The feature extractor of a checkpoint that takes recordings in prompts: log-mel spectrograms."""

from pathlib import Path
from typing import Any

from tokenmesh.services.tokenizer_svc.loading import read_json
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError


def extractor_settings(directory: Path) -> JsonObject:
    """Its options, from the file that has them. Raises CheckpointError."""
    nested = read_json(directory / "processor_config.json").get("feature_extractor")
    settings = nested if isinstance(nested, dict) else {}
    settings = settings or read_json(directory / "preprocessor_config.json")
    if not settings:
        raise CheckpointError(f"{directory} holds no preprocessor_config.json")
    return settings


def load_whisper_extractor(directory: Path) -> Any:
    """transformers' WhisperFeatureExtractor, which needs numpy only. Raises CheckpointError."""
    from transformers import WhisperFeatureExtractor

    try:
        return WhisperFeatureExtractor.from_dict(extractor_settings(directory))
    except (TypeError, ValueError) as error:
        what = f"its feature extractor cannot be loaded: {error}"
        raise CheckpointError(f"{directory}: {what}") from error
