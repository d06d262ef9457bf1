"""Which token ids end a stream, as the checkpoint states it."""

from pathlib import Path
from typing import Final

from tokenmesh.services.worker_svc.models import refused_keys
from tokenmesh.services.worker_svc.models.raw_config import RawConfig, read_json
from tokenmesh.services.worker_svc.models.tokenizer_eos import tokenizer_eos
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError

_ADVICE: Final = "; --generation-config vllm takes nothing but end tokens from this file"


def read_eos(
    raw: RawConfig, directory: Path, model: ModelSettings, vocab_size: int
) -> frozenset[int]:
    """generation_config.json's or else config.json's, and the tokenizer's, as vLLM has it.

    Those that the model can draw. Raises CheckpointError.
    """
    ids = _configured(raw, directory, model) | tokenizer_eos(model)
    return frozenset(each for each in ids if each < vocab_size)


def _configured(raw: RawConfig, directory: Path, model: ModelSettings) -> frozenset[int]:
    path = directory / "generation_config.json"
    text = raw.part("text_config")
    sources = [raw] if text is None else [raw, text]
    if path.exists():
        generation = read_json(path)
        sources.insert(0, generation)
        if model.generation_config == "auto":
            refused_keys.refuse(generation, refused_keys.GENERATION, _ADVICE)
    for source in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(
                f"{source.origin}: eos_token_id is {value!r}, not a token id or a list of them",
                param="eos_token_id",
            )
        return frozenset(ids)
    return frozenset()
