"""Whether a tokenizer and a model belong together: its ids are rows of the embedding."""

import logging
from pathlib import Path
from typing import Any

import msgspec

from tokenmesh.services.worker_svc.models.location import locate_tokenizer
from tokenmesh.services.worker_svc.models.raw_config import RawConfig
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError

logger = logging.getLogger(__name__)


class _Added(msgspec.Struct):
    id: int
    content: str = ""
    special: bool = False


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model = _Model()
    added_tokens: list[_Added] = []


def check_tokenizer_ids(model: ModelSettings, raw: RawConfig, vocab_size: int) -> None:
    """Raise CheckpointError where tokenizer.json makes ids past the embedding out of text.

    Special tokens past it and those that config.json gives a purpose are logged: text models have
    some for images, and a request that holds one outside of its media is refused. A worker needs
    no tokenizer, so none is no error.
    """
    try:
        path = locate_tokenizer(model)
    except CheckpointError:
        return
    tokenizer = _read(path)
    added = {each.id: each for each in tokenizer.added_tokens}
    vocab = tokenizer.model.vocab
    ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
    rows = f"the embedding of {model.model} has {vocab_size} rows"
    largest = max((each for each in ids if each not in added), default=0)
    if largest >= vocab_size:
        raise CheckpointError(f"{path}: model.vocab has ids up to {largest}; {rows}")
    placeholders = _placeholders(raw)
    past = [added[each] for each in sorted(added) if each >= vocab_size]
    made = [each for each in past if not each.special and each.id not in placeholders]
    if made:
        raise CheckpointError(f"{path}: added_tokens has {_listed(made)}; {rows}")
    if past:
        logger.warning("%s: %s, so requests with %s are refused", path, rows, _listed(past))


def _placeholders(raw: RawConfig) -> set[int]:
    """Ids that stand for media, such as image_token_id; and others that have a key."""
    endings = ("_token_id", "_token_index")
    return {
        value
        for key, value in raw.values.items()
        if key.endswith(endings) and isinstance(value, int)
    }


def _listed(tokens: list[_Added]) -> str:
    return ", ".join(f"{each.content} ({each.id})" for each in tokens[:5])


def _read(path: Path) -> _Tokenizer:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
