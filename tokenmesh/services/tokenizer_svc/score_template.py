"""ScoreTemplate: what writes a pair of texts as one prompt, for rerankers that read one.

A template for scores is the operator's (`--chat-template`), the request's, or one that a
CrossEncoder of sentence-transformers declares. One that only stands next to the tokenizer is not:
many rerankers have that of the model they were made of, which was not used to train them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.model_files import sentence_config_path

_SWITCH: Final = "add_generation_prompt"
_NOT_SERVED: Final = ("tokenize", "tools", "continue_final_message")


@dataclass(frozen=True, slots=True)
class ScoreTemplate:
    """The template that writes a pair, and what it always gets."""

    name: str
    """Among the model's templates."""
    variables: JsonObject = field(default_factory=dict)
    add_generation_prompt: bool = False


def declared_template(
    directory: Path, read: Callable[[Path], JsonObject], templates: Mapping[str, str], default: str
) -> ScoreTemplate | None:
    """That of a CrossEncoder whose module takes messages. Raises CheckpointError.

    read: reads the object in a file; empty if there is none.
    """
    path = sentence_config_path(directory)
    stated = read(directory / "config_sentence_transformers.json")
    if path is None or stated.get("model_type") != "CrossEncoder":
        return None
    config = read(path)
    modalities, options = config.get("modality_config"), config.get("processing_kwargs") or {}
    if not isinstance(modalities, dict) or "message" not in modalities:
        return None
    given = options.get("chat_template") or {} if isinstance(options, dict) else None
    if not isinstance(given, dict):
        raise CheckpointError(f"{path}: processing_kwargs.chat_template is not an object")
    variables = {key: value for key, value in given.items() if key != "restore_suffix"}
    for name in _NOT_SERVED:
        if name in variables:
            raise CheckpointError(
                f"{path}: {name} in processing_kwargs.chat_template is not supported"
            )
    name, is_open = variables.pop("chat_template", default), variables.pop(_SWITCH, False)
    if not isinstance(name, str) or name not in templates:
        raise CheckpointError(
            f"{path} says that pairs are messages, and there is no chat template {name!r}"
        )
    return ScoreTemplate(name, variables, is_open is True)
